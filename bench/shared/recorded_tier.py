"""A local tier that replays recorded answers with their signals and hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...classifier.arrays import Array
from ...local_engine.runtime.generation import LocalToken
from ...local_engine.sampling.signals import TokenSignals
from ...protocol.requests import Message
from ...protocol.sampling import SamplingParams
from ...router.tiers.interfaces import ChatOnlyTier, FinishReason, LocalAnswer


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded answer with the model's signals and states."""

    text: str
    # Signals per token, plus those of the end-of-answer token if the answer is complete.
    signals: Sequence[TokenSignals]
    prompt_tokens: int
    finish_reason: FinishReason = "stop"
    prompt_hidden: Array | None = None
    answer_hidden: Array | None = None


class RecordedTier(ChatOnlyTier):
    """`LocalTier` that looks up the recorded answer to the text of the last message."""

    context_length = 2048
    tool_format = None
    reasoning = None

    def __init__(self, model_id: str, answers: Mapping[str, RecordedAnswer]) -> None:
        self.model_id = model_id
        self._answers = answers

    async def start(self, messages: Sequence[Message], params: SamplingParams, **_: Any) -> RecordedGeneration:  # noqa: ARG002
        return RecordedGeneration(self._answers[messages[-1].text])

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:  # noqa: ARG002
        return b""

    async def aclose(self) -> None:
        """Do nothing, as no resource is open."""


class RecordedGeneration:
    """`LocalGeneration` that returns all text with the last token, so that gate 2 sees only signals."""

    def __init__(self, recorded: RecordedAnswer) -> None:
        self._recorded = recorded
        self._count = len(recorded.signals) - (recorded.finish_reason != "length")  # without the end-of-answer token
        self.answer = LocalAnswer(prompt_tokens=recorded.prompt_tokens, prompt_hidden=recorded.prompt_hidden)

    def __aiter__(self) -> RecordedGeneration:
        return self

    async def __anext__(self) -> LocalToken:
        answer, recorded, at = self.answer, self._recorded, len(self.answer.tokens)
        if at >= self._count:
            answer.text, answer.signals = recorded.text, list(recorded.signals)
            answer.finish_reason, answer.answer_hidden = recorded.finish_reason, recorded.answer_hidden
            raise StopAsyncIteration
        token = LocalToken(at, recorded.text if at == self._count - 1 else "", recorded.signals[at])
        answer.tokens.append(token)
        answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """Do nothing, as no generation is running."""
