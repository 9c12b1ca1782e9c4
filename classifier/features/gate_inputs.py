"""What the gates look at: a question before it is answered, and a local run while and after it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...protocol.requests import Message
from ..arrays import Array

# Of how many questions a policy remembers what it has read: those of requests whose answers are being written.
QUESTIONS_AT_ONCE = 64


class Signals(Protocol):
    """What a local engine says about one token, in nats."""

    @property
    def logprob(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def margin(self) -> float: ...


class Run(Protocol):
    """What a local engine knows of a run, whether it goes on or not; what it cannot tell is None."""

    @property
    def text(self) -> str: ...
    @property
    def prompt_logprobs(self) -> Array | None: ...
    @property
    def prompt_hidden(self) -> Array | None: ...
    @property
    def answer_hidden(self) -> Array | None: ...
    @property
    def finish_reason(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PromptView:
    """The question: `text` is the last user turn.

    The gates read no other, so that a long system prompt or an agent's harness cannot drown it.
    """

    text: str

    @classmethod
    def of(cls, messages: Sequence[Message]) -> PromptView:
        """The view of a conversation. Without a user turn the last message stands in; no message: empty text."""
        texts = [message.text for message in messages]
        asked = [text for message, text in zip(messages, texts, strict=True) if message.role == "user"]
        return cls((asked or texts or [""])[-1])


@dataclass(frozen=True, slots=True)
class RunView:
    """One local run, finished or not.

    `logprobs`, `entropies`, `margins`: (n,) float32, nats, one entry per generated token.
    `prompt_logprobs`: (m,) float32, the log-probability the local model gave each prompt token.
    `prompt_hidden`, `answer_hidden`: (hidden_size,) float32 at the last prompt and last generated position;
    `answer_hidden` is None while the run has not finished. `finish_reason` is "stop", "length" or "" (still running).
    """

    prompt: PromptView
    answer: str
    logprobs: Array
    entropies: Array
    margins: Array
    prompt_logprobs: Array
    prompt_hidden: Array
    answer_hidden: Array | None
    finish_reason: str

    @classmethod
    def of(cls, messages: Sequence[Message], run: Run, signals: Sequence[Signals]) -> RunView:
        """The view of a local engine's run that answers `messages`."""
        columns = np.array([(s.logprob, s.entropy, s.margin) for s in signals], np.float32).reshape(-1, 3)
        nothing = np.empty(0, np.float32)
        return cls(
            prompt=PromptView.of(messages),
            answer=run.text,
            logprobs=columns[:, 0],
            entropies=columns[:, 1],
            margins=columns[:, 2],
            prompt_logprobs=nothing if run.prompt_logprobs is None else run.prompt_logprobs,
            prompt_hidden=nothing if run.prompt_hidden is None else run.prompt_hidden,
            answer_hidden=run.answer_hidden,
            finish_reason=run.finish_reason or "",
        )
