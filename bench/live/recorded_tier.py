"""A local tier that gives recorded answers, with the signals and hidden states that the model gave with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...classifier.graded_row import GradedRow
from ...protocol.requests import Message
from ...protocol.sampling import SamplingParams
from ...router.tiers.interfaces import ChatsOnly, LocalAnswer


@dataclass(frozen=True, slots=True)
class _Signals:
    logprob: float
    entropy: float
    margin: float


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    text: str
    signals: _Signals
    top: tuple[tuple[int, float], ...] = ()


class RecordedTier(ChatsOnly):
    """`LocalTier` over graded rows, by their prompts."""

    context_length = 2048
    tool_format = None
    reasoning = None

    def __init__(self, model_id: str, rows: Mapping[str, GradedRow]) -> None:
        self.model_id = model_id
        self._rows = rows

    async def start(self, messages: Sequence[Message], params: SamplingParams, **_: Any) -> RecordedGeneration:  # noqa: ARG002
        return RecordedGeneration(self._rows[messages[-1].text])

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:  # noqa: ARG002
        return b""

    async def aclose(self) -> None:
        """Nothing is open."""


class RecordedGeneration:
    """`LocalGeneration`. The whole text comes with the last token; gates judge openings by signals alone."""

    def __init__(self, row: GradedRow) -> None:
        assert row.signals is not None and row.states is not None
        told = zip(row.signals.logprobs, row.signals.entropies, row.signals.margins, strict=True)
        self._signals = [_Signals(*map(float, each)) for each in told]
        self._row, self._states = row, row.states
        self.answer = LocalAnswer(prompt_tokens=len(row.prompt) // 4, prompt_hidden=row.states.prompt_hidden)

    def __aiter__(self) -> RecordedGeneration:
        return self

    async def __anext__(self) -> _Token:
        answer, at, cut = self.answer, len(self.answer.tokens), self._states.finish_reason == "length"
        last = len(self._signals) - (1 if cut else 2)  # the signal behind the last token is that of the end
        if at > last:
            answer.text, answer.signals = self._row.answer or "", list(self._signals)
            answer.finish_reason = "length" if cut else "stop"
            answer.answer_hidden = self._states.answer_hidden
            raise StopAsyncIteration
        token = _Token(at, (self._row.answer or "") if at == last else "", self._signals[at])
        answer.tokens.append(token)
        answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """There is nothing to stop."""
