"""Prompt reports in answers: vLLM's `prompt_logprobs`, and OpenAI's `echo` with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from ....protocol.responses import ChatCompletion, PromptToken, TextChoice, TextCompletion, TextLogprobs
from ....text.echoed_prompt import echoed_logprobs
from ....text.tokenizer import Tokenizer
from .answer_stream import Piece
from .formats import WrappedFormat

if TYPE_CHECKING:
    from ...engine.types.outputs import PromptLogprob

PromptLogprobs = list[dict[str, PromptToken] | None]


@dataclass(frozen=True, slots=True)
class ReportedPrompt:
    """A prompt's tokens. `echo`: its text, which is put before every answer; None if no echo was requested."""

    token_ids: list[int]
    echo: str | None = None


@dataclass(slots=True)
class PromptReport(WrappedFormat):
    """Adds a report on the prompt to each answer."""

    tokenizer: Tokenizer
    prompts: list[ReportedPrompt]
    # Number of answers per prompt.
    n: int
    # Alternatives per token in `prompt_logprobs`; None if the request did not ask for them.
    logprobs: int | None
    _scores: dict[int, list[PromptLogprob]] = field(default_factory=dict[int, "list[PromptLogprob]"])
    _begun: set[int] = field(default_factory=set[int])

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        self._take_scores(piece)
        return [self._completed(chunk) for chunk in self.answers.chunks(piece)]

    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct:
        for answer in answers:
            self._take_scores(answer)
        return self._completed(self.answers.whole(answers))

    def _take_scores(self, piece: Piece) -> None:
        if piece.prompt_scores:
            self._scores[piece.index // self.n] = piece.prompt_scores

    def _completed(self, shown: msgspec.Struct) -> msgspec.Struct:
        if isinstance(shown, ChatCompletion):
            shown.prompt_logprobs = self._prompt_logprobs(0)
        elif isinstance(shown, TextCompletion):
            for choice in shown.choices:
                self._complete(choice)
        return shown

    def _complete(self, choice: TextChoice) -> None:
        number = choice.index // self.n
        choice.prompt_logprobs = self._prompt_logprobs(number)
        echo = self.prompts[number].echo
        if echo is None:
            return
        if choice.logprobs is not None:
            offsets = [len(echo) + offset for offset in choice.logprobs.text_offset]
            choice.logprobs = msgspec.structs.replace(choice.logprobs, text_offset=offsets)
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            choice.text = echo + choice.text
            if choice.logprobs is not None:
                choice.logprobs = TextLogprobs.joined([self._echoed(number), choice.logprobs])

    def _prompt_logprobs(self, number: int) -> PromptLogprobs | UnsetType:
        """Return an entry per prompt token, with the likeliest alternatives by id; the entry of the first is None."""
        if self.logprobs is None:
            return UNSET
        entries: PromptLogprobs = [None]
        for token_id, score in self._scored(number):
            likeliest = enumerate(score.top[: self.logprobs], 1)
            top = {str(other): self._shown(other, logprob, rank) for rank, (other, logprob) in likeliest}
            entries.append({str(token_id): self._shown(token_id, score.logprob, score.rank), **top})
        return entries

    def _shown(self, token_id: int, logprob: float, rank: int) -> PromptToken:
        return PromptToken(logprob, rank, self._text_of(token_id))

    def _scored(self, number: int) -> list[tuple[int, PromptLogprob]]:
        return list(zip(self.prompts[number].token_ids[1:], self._scores.get(number, []), strict=True))

    def _echoed(self, number: int) -> TextLogprobs:
        scores = ((score.logprob, score.top) for score in self._scores.get(number, []))
        return echoed_logprobs(self.prompts[number].token_ids, scores, self.tokenizer.token_bytes)

    def _text_of(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id, skip_special=False).decode("utf-8", "replace")
