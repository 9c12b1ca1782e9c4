"""The feature vector of each gate: which blocks it reads, where they lie, and the version that ties them to a policy.

Only numpy: the same functions make the rows that training fits and the row that inference scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..arrays import Array
from .answer_checks import ANSWER_NAMES, answer_checks
from .answer_parts import AnswerParts
from .gate_inputs import PromptView, RunView
from .parsed_question import ParsedQuestion
from .question_vector import NGRAM_WIDTH, STRUCTURE_NAMES
from .token_signals import PROMPT_SIGNAL_NAMES, SIGNAL_NAMES, prompt_signals, signals

__all__ = ["FEATURE_VERSION", "GATES", "FeatureLayout", "Gate", "PromptView", "RunView", "after", "before", "during"]

# Raise it with every change that alters any feature of any input: a policy refuses features it was not trained on.
FEATURE_VERSION = 4

Gate = Literal["gate1", "gate2", "gate3"]
Block = Literal["ngrams", "structure", "prompt_signals", "signals", "answer", "prompt_hidden", "answer_hidden"]
GATES: tuple[Gate, ...] = ("gate1", "gate2", "gate3")
_BLOCKS: dict[Gate, tuple[Block, ...]] = {
    "gate1": ("structure", "ngrams"),
    "gate2": ("structure", "prompt_signals", "signals", "prompt_hidden"),
    "gate3": ("structure", "prompt_signals", "signals", "answer", "ngrams", "prompt_hidden", "answer_hidden"),
}
_NAMES: dict[Block, tuple[str, ...]] = {
    "structure": STRUCTURE_NAMES,
    "prompt_signals": PROMPT_SIGNAL_NAMES,
    "signals": SIGNAL_NAMES,
    "answer": ANSWER_NAMES,
}
_HIDDEN_LIMIT = np.float32(1e4)


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """Where each block lies in a gate's vector, for a local model of `hidden_size`."""

    gate: Gate
    hidden_size: int

    def width_of(self, block: Block) -> int:
        if block in ("prompt_hidden", "answer_hidden"):
            return self.hidden_size
        return NGRAM_WIDTH if block == "ngrams" else len(_NAMES[block])

    @property
    def blocks(self) -> dict[Block, slice]:
        found: dict[Block, slice] = {}
        start = 0
        for block in _BLOCKS[self.gate]:
            found[block] = slice(start, start + self.width_of(block))
            start += self.width_of(block)
        return found

    @property
    def width(self) -> int:
        return sum(self.width_of(block) for block in _BLOCKS[self.gate])

    def columns(self, *blocks: Block) -> list[int]:
        """The columns of the named blocks, those the gate has, in order."""
        return [column for block in blocks if block in self.blocks for column in range(self.width)[self.blocks[block]]]

    @property
    def names(self) -> list[str]:
        """A readable name per column: plain for measures, `block_i` for hashed and hidden columns."""
        return [
            name
            for block in _BLOCKS[self.gate]
            for name in _NAMES.get(block, [f"{block}_{i}" for i in range(self.width_of(block))])
        ]


def before(prompt: PromptView, asked: ParsedQuestion | None = None) -> Array:
    """Gate 1's vector: the question alone. `asked`: of this prompt, if an earlier gate has read it."""
    asked = asked or ParsedQuestion.of(prompt.text)
    return np.concatenate((asked.structure, asked.ngrams))


def during(view: RunView, tokens: int, asked: ParsedQuestion | None = None, surprise: Array | None = None) -> Array:
    """Gate 2's vector from the first `tokens` generated tokens; later tokens and the answer's text are not read.

    `surprise`: `prompt_signals` of the run's prompt, if they are known.
    """
    asked = asked or ParsedQuestion.of(view.prompt.text)
    surprise = prompt_signals(view.prompt_logprobs) if surprise is None else surprise
    return np.concatenate((asked.structure, surprise, signals(view, tokens), _hidden(view.prompt_hidden)))


def after(
    view: RunView,
    asked: ParsedQuestion | None = None,
    parts: AnswerParts | None = None,
    surprise: Array | None = None,
) -> Array:
    """Gate 3's vector: everything. A run without an answer's hidden state counts as zeros there.

    `asked`, `parts`, `surprise`: of the run's prompt and answer, if they have been read; the last as for `during`.
    """
    asked = asked or ParsedQuestion.of(view.prompt.text)
    surprise = prompt_signals(view.prompt_logprobs) if surprise is None else surprise
    answer_hidden = np.zeros_like(view.prompt_hidden) if view.answer_hidden is None else view.answer_hidden
    return np.concatenate(
        (
            asked.structure,
            surprise,
            signals(view),
            answer_checks(view, asked.mentioned, parts),
            asked.ngrams,
            _hidden(view.prompt_hidden),
            _hidden(answer_hidden),
        )
    )


def _hidden(state: Array) -> Array:
    single = np.asarray(state, np.float32)
    return np.minimum(np.maximum(np.where(np.isnan(single), np.float32(0), single), -_HIDDEN_LIMIT), _HIDDEN_LIMIT)
