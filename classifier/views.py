"""What the gates look at: a question before it is answered, and a local run while and after it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protocol.requests import Message

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptView:
    """The question: `text` is the last user turn; the rest describes the conversation around it.

    The gates read the last user turn only, so that a long system prompt or an agent's harness cannot drown it.
    """

    text: str
    n_messages: int = 1
    total_chars: int = 0

    @classmethod
    def of(cls, messages: Sequence[Message]) -> PromptView:
        """The view of a conversation. Without a user turn the last message stands in; no message: empty text."""
        texts = [message.text for message in messages]
        asked = [text for message, text in zip(messages, texts, strict=True) if message.role == "user"]
        return cls((asked or texts or [""])[-1], len(messages), sum(map(len, texts)))


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
