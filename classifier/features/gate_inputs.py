"""Inputs of the gates: the question before generation, and the local run during and after generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from ...protocol.requests import Message
from ..arrays import Array

# Number of questions whose parsed form a policy caches, enough for the requests in flight.
QUESTIONS_AT_ONCE = 64
EARLIER_TURNS = 2  # number of user turns read before the last user turn
_QUESTION_CHARS, _ANSWER_CHARS = 2_000, 400  # characters kept of an earlier question's end and answer's beginning


class Signals(Protocol):
    """One token's signals from a local engine, in nats."""

    @property
    def logprob(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def margin(self) -> float: ...


class Run(Protocol):
    """A local engine's run, finished or not; None for values that the engine cannot report."""

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


class EarlierTurn(NamedTuple):
    """An earlier question and the beginning of its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class PromptView:
    """The question (the last user turn) and a bounded part of the turns before it.

    The gates read nothing else, so that a long system prompt or agent harness cannot drown the question.
    """

    text: str
    # Earlier turns, oldest first.
    earlier: tuple[EarlierTurn, ...] = ()

    @classmethod
    def of(cls, messages: Sequence[Message]) -> PromptView:
        """Return the view of a conversation: its last user turn, else its last message, else empty text."""
        user_turns = [at for at, message in enumerate(messages) if message.role == "user"]
        if not user_turns:
            return cls(messages[-1].text if messages else "")
        ends = [*user_turns[1:], len(messages)]
        turns = list(zip(user_turns, ends, strict=True))[-1 - EARLIER_TURNS : -1]
        return cls(messages[user_turns[-1]].text, tuple(_earlier_turn(messages[start:end]) for start, end in turns))

    @property
    def key(self) -> str:
        """The cache key: the question, followed by the earlier turns if there are any."""
        return "\0".join((self.text, *chain.from_iterable(self.earlier)))


def _earlier_turn(messages: Sequence[Message]) -> EarlierTurn:
    """Convert a turn, which starts with a user's message: keep the question's end and the answer's beginning."""
    answer = next((message.text for message in messages if message.role == "assistant" and message.text), "")
    return EarlierTurn(messages[0].text[-_QUESTION_CHARS:], answer[:_ANSWER_CHARS])


@dataclass(frozen=True, slots=True)
class RunView:
    """One local run with n generated and m prompt tokens, finished or not. Arrays are float32; signals are in nats."""

    prompt: PromptView
    answer: str
    # (n,) log-probability of each generated token.
    logprobs: Array
    # (n,) entropy of the distribution of each generated token.
    entropies: Array
    # (n,) log-probability of each generated token minus that of the runner-up.
    margins: Array
    # (m,) log-probability of each prompt token.
    prompt_logprobs: Array
    # (hidden size,) hidden state at the last prompt token.
    prompt_hidden: Array
    # (hidden size,) hidden state at the last generated token; None while the run is unfinished.
    answer_hidden: Array | None
    # "stop", "length", or "" while the run is unfinished.
    finish_reason: str

    @classmethod
    def of(cls, messages: Sequence[Message], run: Run, signals: Sequence[Signals]) -> RunView:
        """Return the view of a local engine's run for `messages`."""
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
