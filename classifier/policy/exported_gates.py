"""A policy's gates at run time: one graph computes the question's topics, and one graph per gate computes P(gain).

Topics are the main directions of a question's wording. All gates share them, and they are computed once per question,
so that gate 3 has little left to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...protocol.errors import ConfigurationError
from ..arrays import Array
from ..features.blocks import BLOCKS, OPENING_TOKENS, AnswerFindings, BlockName, Mode, ParsedRun
from ..features.gate_inputs import PromptView, RunView
from ..features.parsed_question import ParsedQuestion
from .answer_reader import AnswerReader, TextCache

# Input and output names of the graphs.
BUCKETS, BUCKET_COUNTS, TOPICS, MEASURES, P_GAIN = "buckets", "counts", "topics", "measures", "p_gain"
_NO_GATE_2 = 2**31
_EMPTY = np.empty(0, np.float32)
# Placeholder for the answer in gates 1 and 2, which read no answer.
_UNREAD = AnswerFindings.of("")


@dataclass(frozen=True, slots=True)
class Graphs:
    """onnxruntime sessions of the graphs from `training/export.py`. Thread-safe."""

    topics: Any
    gates: Mapping[Mode, Any]

    def read(self, counts: Array) -> Array:
        """Return a question's topics, (1, topics) float32, from its n-gram counts, (COUNTS,)."""
        buckets = np.flatnonzero(counts > 0)  # counts are not negative, and most are zero
        return self.topics.run([TOPICS], {BUCKETS: buckets, BUCKET_COUNTS: counts[buckets]})[0]

    def decide(self, mode: Mode, topics: Array, measures: Array) -> float:
        """Return P(gain) from the question's topics, (1, topics), and the measures of the row, (k,)."""
        return float(self.gates[mode].run([P_GAIN], {TOPICS: topics, MEASURES: measures[None]})[0][0])


class ExportedGates:
    """Gates that compute P(gain), the probability that the cloud's answer is better, at three points of a request.

    `blocks`: the blocks that each gate reads, with their widths. Without the block `conversation` only the last
    question is read. Without a gate 2 or 3, `during` or `after` repeat gate 1's result. Thread-safe and deterministic.
    """

    def __init__(self, graphs: Graphs, blocks: Mapping[Mode, Mapping[BlockName, int]]) -> None:
        self._graphs = graphs
        self._blocks = blocks
        self._follows = any("conversation" in declared for declared in blocks.values())
        # Parsed questions with their topics. Gate 3 reads a question that gate 1 has parsed shortly before.
        self._questions: TextCache[tuple[ParsedQuestion, Array]] = TextCache()
        self._answers = AnswerReader()

    def warm_up(self) -> None:
        """Run each graph once, to allocate memory and to check that it accepts this Updraft version's features."""
        topics = self._graphs.read(ParsedQuestion.of(PromptView("What is 2 + 2?")).counts)
        for mode, declared in self._blocks.items():
            width = sum(BLOCKS[name].width or width for name, width in declared.items())
            self._graphs.decide(mode, topics, np.zeros(width, np.float32))

    @property
    def gate2_tokens(self) -> int:
        """Number of tokens before gate 2 decides; without a gate 2, a number that no answer reaches."""
        return OPENING_TOKENS if "opening" in self._blocks else _NO_GATE_2

    @property
    def reads_answers(self) -> bool:
        return "cascade" in self._blocks

    def before(self, prompt: PromptView) -> float:
        """Gate 1: return P(gain) from the question alone, in [0, 1]."""
        return self._decide("prompt", RunView(prompt, "", _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, None, ""), _UNREAD)

    def during(self, view: RunView) -> float:
        """Gate 2: return P(gain) from the question and the first `gate2_tokens` tokens."""
        if "opening" not in self._blocks:
            return self.before(view.prompt)
        return self._decide("opening", view, _UNREAD)

    def read_ahead(self, prompt: PromptView) -> None:
        """Parse the question for gate 3 while the local model is busy."""
        if self.reads_answers:
            question, _ = self._question(prompt)
            _ = question.mentioned, question.given

    def read_lines(self, answer: str) -> None:
        """Parse the complete lines of an unfinished answer for gate 3."""
        if self.reads_answers:
            self._answers.read_ahead(answer)

    def after(self, view: RunView) -> float:
        """Gate 3: return P(gain) from question and answer."""
        if not self.reads_answers:
            return self.before(view.prompt)
        return self._decide("cascade", view, self._answers.read(view.answer))

    def _decide(self, mode: Mode, view: RunView, answered: AnswerFindings) -> float:
        question, topics = self._question(view.prompt)
        declared, run = self._blocks[mode], ParsedRun(view, question, answered)
        blocks: dict[BlockName, Array] = {name: BLOCKS[name].compute(run) for name in declared}
        other: list[BlockName] = [name for name, block in blocks.items() if len(block) != declared[name]]
        if other:
            raise ConfigurationError(
                f"The policy needs {declared[other[0]]} values of {other[0]}, but the local model gives "
                f"{len(blocks[other[0]])}. Use a policy that was calibrated for this model."
            )
        return self._graphs.decide(mode, topics, np.concatenate(list(blocks.values())))

    def _question(self, prompt: PromptView) -> tuple[ParsedQuestion, Array]:
        read = prompt if self._follows else PromptView(prompt.text)

        def parsed(_: str) -> tuple[ParsedQuestion, Array]:
            question = ParsedQuestion.of(read)
            return question, self._graphs.read(question.counts)

        return self._questions.find(read.key, parsed)
