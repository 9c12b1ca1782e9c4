"""Blocks of features that the gates read: the row fields each block needs, its width, and how to compute it.

A new block needs an entry in `BLOCKS` and its name in `GATE_BLOCKS`. The card of a policy (`policy.json`) declares the
blocks that its gates read. Training and inference both compute the blocks with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...protocol.errors import InvalidRequestError
from ..arrays import Array
from ..graded_row import AnswerSignals, GradedRow, ModelStates
from .answers.arithmetic import STEP_NAMES, StatedSteps, find_steps, step_checks
from .answers.checks import ANSWER_NAMES, answer_checks
from .answers.parts import AnswerParts, parts_of
from .gate_inputs import PromptView, RunView
from .parsed_question import CONVERSATION_NAMES, ParsedQuestion
from .quantities import QUANTITY_NAMES
from .token_signals import PROMPT_SIGNAL_NAMES, SIGNAL_NAMES, prompt_signals, signals
from .wording import MEASURE_NAMES

# Increase with every change to any feature, so that policies trained on other features are rejected.
FEATURE_VERSION = 4

# Time of the decision: before, during or after generation.
Mode = Literal["prompt", "opening", "cascade"]
BlockName = Literal[
    "wording",
    "quantities",
    "conversation",
    "checks",
    "steps",
    "ending",
    "signals",
    "opening",
    "prompt_signals",
    "prompt_hidden",
    "answer_hidden",
]
OPENING_TOKENS = 8
_HIDDEN_LIMIT = np.float32(1e4)
_EMPTY = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class AnswerFindings:
    """The parsed answer that gate 3 reads. Complete lines are parsed while the model writes the next lines."""

    parts: AnswerParts
    steps: StatedSteps

    @classmethod
    def of(cls, text: str) -> AnswerFindings:
        return cls(parts_of(text), find_steps(text))

    def __add__(self, other: AnswerFindings) -> AnswerFindings:
        return AnswerFindings(self.parts + other.parts, self.steps + other.steps)


@dataclass(frozen=True, slots=True)
class ParsedRun:
    """A local run with its parsed question and answer: the input of every block."""

    view: RunView
    question: ParsedQuestion
    answered: AnswerFindings

    @classmethod
    def of(cls, view: RunView) -> ParsedRun:
        return cls(view, ParsedQuestion.of(view.prompt), AnswerFindings.of(view.answer))


@dataclass(frozen=True, slots=True)
class Block:
    """A group of features that are available together."""

    # Fields that a row must have for the block to be computed.
    needs: tuple[str, ...]
    # Number of features; None: the size of the local model's hidden state.
    width: int | None
    # Computes the features of a run, (width,) float32.
    compute: Callable[[ParsedRun], Array]

    def known(self, row: GradedRow) -> bool:
        """Return whether the block can be computed for `row`."""
        return all(getattr(row, name) is not None for name in self.needs)


BLOCKS: dict[BlockName, Block] = {
    "wording": Block((), len(MEASURE_NAMES), lambda run: run.question.measures),
    "quantities": Block((), len(QUANTITY_NAMES), lambda run: run.question.quantities),
    "conversation": Block(("messages",), len(CONVERSATION_NAMES), lambda run: run.question.conversation),
    "checks": Block(
        ("answer",),
        len(ANSWER_NAMES),
        lambda run: answer_checks(run.view.answer, run.question.mentioned, run.answered.parts),
    ),
    "steps": Block(
        ("answer",), len(STEP_NAMES), lambda run: step_checks(run.question.given, run.view.answer, run.answered.steps)
    ),
    "ending": Block(("states",), 1, lambda run: np.array([run.view.finish_reason == "length"], np.float32)),
    "signals": Block(("answer", "signals"), len(SIGNAL_NAMES), lambda run: signals(run.view)),
    "opening": Block(("answer", "signals"), len(SIGNAL_NAMES), lambda run: signals(run.view, OPENING_TOKENS)),
    "prompt_signals": Block(
        ("states",), len(PROMPT_SIGNAL_NAMES), lambda run: prompt_signals(run.view.prompt_logprobs)
    ),
    "prompt_hidden": Block(("states",), None, lambda run: _bounded(run.view.prompt_hidden)),
    "answer_hidden": Block(("states",), None, lambda run: _bounded(answer_hidden_of(run.view))),
}
# Blocks that each gate reads if the rows have them. `wording` and `quantities` are always available. A policy has a
# gate 2 only with the block `opening`, and a gate 3 only with the block `checks`.
GATE_BLOCKS: dict[Mode, tuple[BlockName, ...]] = {
    "prompt": ("wording", "quantities", "conversation"),
    "opening": ("wording", "quantities", "conversation", "opening", "prompt_signals", "prompt_hidden"),
    "cascade": (
        *("wording", "quantities", "conversation", "checks", "steps", "signals", "ending"),
        *("prompt_signals", "prompt_hidden", "answer_hidden"),
    ),
}


def blocks_of_all(rows: Sequence[GradedRow]) -> list[BlockName]:
    """Return the blocks that can be computed for every row.

    Raises InvalidRequestError if a block can be computed for only some of the rows.
    """
    names: list[BlockName] = []
    for name, block in BLOCKS.items():
        count = sum(map(block.known, rows))
        if 0 < count < len(rows):
            raise InvalidRequestError(
                f"Only {count} of {len(rows)} rows have the data for the block {name}: add it to every row, or to none."
            )
        if count:
            names.append(name)
    return names


def prompt_of(row: GradedRow) -> PromptView:
    """Return the question of a row with its earlier turns."""
    return PromptView.of(row.messages) if row.messages else PromptView(row.prompt)


def view_of(row: GradedRow) -> RunView:
    """Return the run of a row; fields that the row lacks are empty."""
    token_signals = row.signals or AnswerSignals(_EMPTY, _EMPTY, _EMPTY)
    states = row.states or ModelStates(_EMPTY, _EMPTY, _EMPTY, "")
    return RunView(
        prompt_of(row),
        row.answer or "",
        token_signals.logprobs,
        token_signals.entropies,
        token_signals.margins,
        states.prompt_logprobs,
        states.prompt_hidden,
        states.answer_hidden,
        states.finish_reason,
    )


def graded_run(view: RunView, weak: float, strong: float, domain: str, family: str = "") -> GradedRow:
    """Return the graded row of a local run. The cloud's token counts are unknown, and set to the local counts."""
    token_signals = AnswerSignals(view.logprobs, view.entropies, view.margins)
    states = ModelStates(view.prompt_logprobs, view.prompt_hidden, answer_hidden_of(view), view.finish_reason)
    tokens = float(len(view.prompt_logprobs)), float(len(view.logprobs))
    return GradedRow(view.prompt.text, weak, strong, domain, view.answer, token_signals, *tokens, states, family)


def answer_hidden_of(view: RunView) -> Array:
    """Return the hidden state at the last generated token; zeros for an unfinished run."""
    return np.zeros_like(view.prompt_hidden) if view.answer_hidden is None else view.answer_hidden


def _bounded(state: Array) -> Array:
    single = np.asarray(state, np.float32)
    return np.minimum(np.maximum(np.where(np.isnan(single), np.float32(0), single), -_HIDDEN_LIMIT), _HIDDEN_LIMIT)
