"""`updraft ask`: answers one question and shows which tier answered."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ...protocol.errors import InvalidRequestError
from ..shared import json_output, options, output
from ..shared.help_panels import shows
from ..shared.option_groups import OmittedFields


@shows(*options.USUAL, "--tier", "--temperature", "--seed", "--json", "--quiet")
def ask(
    *,
    question: Annotated[str, typer.Argument(help="Question, or - to read standard input.", show_default=False)],
    tier: Annotated[options.Tier, typer.Option(help="Tier to ask; auto lets the router decide.")] = options.Tier.AUTO,
    pair: Annotated[options.Pair, OmittedFields("tool_call_parser")],
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy. [the model's own]")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Sampling seed, for repeatable answers.")] = None,
    as_json: json_output.Flag = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False,
) -> None:
    """Ask one question. The answer goes to standard output, everything else to standard error.

    \b
    Examples
      updraft ask --local pocket "What is 17 + 25?"
      updraft ask --local model.gguf --tier local --json "What is the capital of Japan?"
      cat question.txt | updraft ask - --local hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf \\
          --cloud-url https://host/v1 --cloud-model big --api-key-env HOST_KEY
    """
    try:
        prompt = sys.stdin.read().strip() if question == "-" else question.strip()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("Standard input is not UTF-8 text.") from error
    if not prompt:
        raise InvalidRequestError("The question is empty.")
    config = pair.config()
    quiet = quiet or as_json
    from ... import OpenAI
    from .conversation import introduction, provenance, stream_answer

    def note(line: str) -> None:
        if not quiet:
            output.note(line)

    for line in introduction(config):
        note(line)
    nodes = 0 if tier is options.Tier.LOCAL else 1
    with options.with_cloud(config, note, nodes=nodes) as chosen, OpenAI(config=chosen) as client:
        show = (lambda _text: None) if as_json else (lambda text: output.echo(text, nl=False))
        sampling = {"temperature": temperature, "seed": seed}
        params = {name: value for name, value in sampling.items() if value is not None}
        answer = stream_answer(client, [{"role": "user", "content": prompt}], tier, show, **params)
    if as_json:
        import msgspec

        facts = {"answer": answer.text, "updraft": msgspec.to_builtins(answer.info)}
        json_output.show(facts)
    else:
        output.echo()
    note(provenance(answer.info))
