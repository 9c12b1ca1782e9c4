"""`updraft chat`: a conversation in the terminal that shows which tier answered and why."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import UpdraftError
from ..shared import options, output
from ..shared.help_panels import shows
from ..shared.option_groups import OmittedFields

if TYPE_CHECKING:
    from ...protocol.responses import UpdraftInfo
    from ...sdk import OpenAI

HELP = """/model                   show the current model and all models
/model NAME              choose a model; auto lets the router decide
/tier auto|local|cloud   choose a tier; auto lets the router decide
/quality 0.95            share of the cloud's quality to keep
/why                     explain the last answer
/new                     start a new conversation
/help                    show this list
/quit                    quit; also exit, quit and Ctrl-D
Ctrl-C stops an answer."""
EXIT_COMMANDS = ("exit", "quit", "/exit", "/quit")


@shows(*options.USUAL)
def chat(pair: Annotated[options.Pair, OmittedFields("tool_call_parser")]) -> None:
    """Chat with both models; a dim line below each answer shows which tier answered, why, and P(gain).

    P(gain) is the calibrated probability that the cloud's answer is better than the local answer. In the chat,
    /help lists the commands. If no model is set, smollm2 answers; you are asked before it is downloaded. The
    packaged pocket pair sees only the current question; other models see the whole conversation.

    \b
    Examples
      updraft chat
      updraft chat --local pocket
      updraft chat --local model.gguf --cloud-url https://host/v1 --cloud-model big --api-key-env HOST_KEY
    """
    from ..models.names import default_local

    if pair.local is None and pair.cloud_url is None:
        pair = replace(pair, local=default_local())
    config = pair.config()
    from ... import OpenAI
    from .conversation import introduction

    for line in introduction(config):
        output.note(line)
    output.note("starting ...")
    with options.with_cloud(config, output.note) as running, OpenAI(config=running) as client:
        output.note("/help lists the commands.")
        _converse(Session(client, remembers=config.local != "pocket"))


@dataclass
class Session:
    """One conversation and its settings."""

    client: OpenAI
    remembers: bool
    # Requested model: `auto`, a tier, or a model's name.
    tier: str = "auto"
    quality: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    # Routing of the last answer; None before the first answer.
    last: UpdraftInfo | None = None

    def command(self, line: str) -> str:
        """Run the command `/name value`, and return the text to show."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/model":
            return self._model(value)
        if name == "/why" and not value:
            return self._why()
        if name == "/tier" and value in ("auto", "local", "cloud"):
            self.tier = value
            return f"tier: {value}"
        if name == "/quality" and (quality := _share(value)):
            self.quality = quality
            return f"quality: {quality:g}"
        if name == "/new" and not value:
            self.messages.clear()
            return "new conversation"
        return HELP if name == "/help" else f"unknown command: {line}\n{HELP}"

    def _model(self, name: str) -> str:
        names = [model.id for model in self.client.models.list()]
        if name and name not in names:
            return f"There is no model {name!r}. Known: {', '.join(names)}"
        self.tier = name or self.tier
        return f"model: {self.tier}" if name else f"model: {self.tier}; known: {', '.join(names)}"

    def _why(self) -> str:
        """Return the ledger's explanation of the last answer, or its routing information if there is no ledger."""
        from openai import APIStatusError

        from .conversation import provenance

        if self.last is None:
            return "There is no answer yet."
        try:
            facts = self.client.updraft.why(self.last.request_id).explanation
        except APIStatusError:
            facts = {"answered": provenance(self.last)}
        lines = [(label, line) for label, text in facts.items() for line in text.splitlines()]
        return "\n".join(f"{label:<12} {line}" for label, line in lines)

    def answer(self, question: str) -> None:
        """Stream one answer to the terminal. Interrupted or failed turns are left out of the conversation."""
        from .conversation import provenance, stream_answer

        turn = {"role": "user", "content": question}
        options = {} if self.quality is None else {"extra_body": {"updraft": {"quality": self.quality}}}
        answer = stream_answer(
            self.client, [*self.messages, turn], self.tier, lambda text: output.echo(text, nl=False), **options
        )
        output.echo()
        output.note(provenance(answer.info))
        self.last = answer.info
        if self.remembers:
            self.messages += [turn, {"role": "assistant", "content": answer.text}]


def _converse(session: Session) -> None:
    from openai import OpenAIError

    while (line := _read()) is not None and line.lower() not in EXIT_COMMANDS:
        try:
            if line.startswith("/"):
                output.note(session.command(line))
            elif line:
                session.answer(line)
        except KeyboardInterrupt:
            output.echo()
            output.note("stopped")
        except (OpenAIError, UpdraftError) as error:
            from ..shared.failures import message_of

            output.secho(message_of(error), fg=typer.colors.RED, err=True)


def _read() -> str | None:
    """Return one input line, edited with readline if it is available; None at end of input (Ctrl-D)."""
    with suppress(ImportError):
        import readline  # noqa: F401 - the import adds line editing to input()
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            output.echo()
        except EOFError:
            output.echo()
            return None


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
