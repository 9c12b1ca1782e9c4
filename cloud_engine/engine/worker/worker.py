"""The worker: holds the sequences of all slots, and executes step plans on the model.

To keep a GPU busy while the host processes a step's tokens, the next step can be launched ahead of time on tokens that
are still on the device (`launch_ahead`). Once the tokens are read, some sequences may turn out to have ended. The rows
of the others are then used if the next plan decodes just these.
"""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.types import QuerySpan
from ....protocol.errors import EngineError
from ....text.grammars.state import Mask
from ..step import DraftProposal, StepPlan, StepResult, StepSampling
from ..types.outputs import PromptLogprob, TokenLogprob
from ..types.pooling import MeanPool
from ..types.sampling_row import RowOf, SamplingRow
from ..types.slot_state import SlotState
from .host_device_copy import HostCopy, to_device
from .model_runner import Chunk, Runner
from .prompt_logprobs import score_prompts
from .sampler import log_probabilities, sample_on_device

#: Runs the drafters over sequences, which they fill with draft tokens (`Speculator.propose`).
Propose = Callable[[Sequence[SlotState], RowOf], None]
#: Returns the mask of a slot after draft tokens; None if the slot has no grammar.
MaskAfter = Callable[[int, Sequence[int]], Mask | None]


@dataclass(slots=True)
class LaunchedStep:
    """A step whose tokens may still be pending on the device."""

    batch: Sequence[SlotState]
    # Leading sequences that only decode.
    num_decodes: int
    # (rows,) int64: the sampled token of each row.
    sampled: Tensor
    # Sampling parameters of the rows.
    rows: list[SamplingRow]
    # (rows, vocab) float32, valid until the next launch; None for a step launched ahead.
    logits: Tensor | None = None
    prompt_scores: dict[int, list[PromptLogprob]] = field(default_factory=dict[int, list[PromptLogprob]])
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy(self.sampled)

    def read(self) -> list[int]:
        """Return the token of each row. Waits for this step only."""
        return self._copy.tolist()

    def of(self, batch: Sequence[SlotState]) -> LaunchedStep | None:
        """Return this step of decodes restricted to `batch`; None if it lacks any of these sequences."""
        if batch == self.batch:
            return self
        places = {state: row for row, state in enumerate(self.batch)}
        rows = [places[state] for state in batch if state in places]
        if len(rows) < len(batch):
            return None
        sampled = self.sampled[to_device(torch.tensor(rows, dtype=torch.int64), self.sampled.device)]
        return LaunchedStep(batch, len(batch), sampled, [self.rows[row] for row in rows])


class Worker:
    """Executes plans in the order `draft`, `launch` and `read`; each step is read before the next one is drafted."""

    def __init__(self, runner: Runner, propose: Propose) -> None:
        self.runner = runner
        self._propose = propose
        self._states: dict[int, SlotState] = {}
        self._slots: list[int] = []
        self._batch: list[SlotState] = []  # sequences of `_slots`, the current step's
        self._launched: LaunchedStep | None = None
        self._ahead: LaunchedStep | None = None

    def reset(self) -> None:
        """Drop all sequences, after a failed step."""
        self._states, self._slots, self._batch, self._launched, self._ahead = {}, [], [], None, None

    def draft(self, plan: StepPlan, mask_after: MaskAfter) -> dict[int, DraftProposal]:
        """Begin a step: apply the plan's changes, and run the drafters. Returns the drafts by slot."""
        self._apply(plan)
        if plan.new or plan.slots != self._slots:
            self._slots, self._batch = plan.slots, [self._states[slot] for slot in plan.slots]
        other_states = self._batch[plan.num_decodes :]
        for state, count in zip(other_states, plan.counts[plan.num_decodes :], strict=True):
            slot = state.sequence.slot
            state.num_tokens, state.draft_ids = count, list(plan.drafts.get(slot, ()))
            if (grant := plan.grants.get(slot)) is not None:
                state.drafter, state.num_drafts = grant.drafter, grant.num_drafts

        def row_of(state: SlotState, num_drafts: int) -> SamplingRow:
            sequence = state.sequence
            mask = mask_after(sequence.slot, state.draft_ids[:num_drafts]) if sequence.is_constrained else None
            return _row(state, num_drafts, mask)

        self._propose([state for state in other_states if not state.sequence.embed], row_of)
        return {
            state.sequence.slot: DraftProposal(state.draft_ids, state.draft_ends)
            for state in other_states
            if state.drafter
        }

    def launch(self, plan: StepPlan, sampling: StepSampling) -> None:
        """Launch the step, unless it was launched ahead. Raises EngineError if a constrained row has no mask."""
        batch, ahead, self._ahead = self._batch, self._ahead, None
        launched = ahead.of(batch) if ahead is not None and plan.num_decodes == len(batch) else None
        self._launched = launched or self._launch(batch, plan.num_decodes, sampling)

    def launch_ahead(self, plan: StepPlan) -> None:
        """Launch the decodes that follow the launched step, whose tokens are not read yet."""
        launched = self._launched
        assert launched is not None, "a step is launched ahead of another one"
        self._apply(plan)
        step = launched.of([self._states[slot] for slot in plan.slots])
        assert step is not None, "each sequence of the next step is in the launched one"
        spans = [QuerySpan(state.num_computed_tokens + 1, 1, state.block_table) for state in step.batch]
        rows = [msgspec.structs.replace(row, position=row.position + 1) for row in step.rows]
        logits = self.runner.run_decodes(spans, step.sampled)
        self._ahead = LaunchedStep(step.batch, len(step.batch), sample_on_device(logits, rows), rows)

    def read(self, plan: StepPlan) -> StepResult:
        """Wait for the launched step, accept drafts and advance the sequences."""
        launched, self._launched = self._launched, None
        assert launched is not None, "a step is read after its launch"
        sampled, num_decodes = launched.read(), launched.num_decodes
        for state, token in zip(launched.batch[:num_decodes], sampled, strict=False):
            state.token_ids.append(token)
            state.num_computed_tokens += 1
        if num_decodes == len(launched.batch):
            return StepResult(plan.id, plan.counts, sampled)
        counts, tokens = [1] * num_decodes, sampled[:num_decodes]
        reported: dict[SlotState, range] = {}
        embeddings: dict[int, list[float]] = {}
        draft_computed: dict[int, int] = {}
        row = num_decodes
        for state in launched.batch[num_decodes:]:
            new = _accepted(state.draft_ids, sampled[row : row + state.num_samples])
            if new and state.sequence.params.logprobs is not None:
                reported[state] = range(row, row + len(new))
            if state.pool is not None and state.is_caught_up:
                embeddings[state.sequence.slot] = state.pool.vector()
            row += state.num_samples
            state.advance(new)
            if state.num_draft_computed_tokens:
                draft_computed[state.sequence.slot] = state.num_draft_computed_tokens
            counts.append(len(new))
            tokens += new
        logprobs = _logprobs(launched.logits, sampled, reported) if reported else {}
        return StepResult(plan.id, counts, tokens, logprobs, launched.prompt_scores, embeddings, draft_computed)

    def _apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the slots."""
        for slot in plan.ended:
            del self._states[slot]
        for sequence in plan.new:
            self._states[sequence.slot] = SlotState(sequence, MeanPool() if sequence.embed else None)
        for new in plan.new_blocks:
            self._states[new.slot].block_table[new.start :] = array("q", new.blocks)

    def _launch(self, batch: list[SlotState], num_decodes: int, sampling: StepSampling) -> LaunchedStep:
        decodes, other_states = batch[:num_decodes], batch[num_decodes:]
        rows = [_row(state, 0, None) for state in decodes]
        for state in other_states:
            masks = _masks(state, sampling)
            del state.draft_ids[max(0, len(masks) - 1) :]
            rows += [_row(state, index, mask) for index, mask in enumerate(masks)]
        if other_states:
            logits = self.runner.run([_chunk(state) for state in batch])
            logits, scores = score_prompts(batch, logits)
            return LaunchedStep(batch, num_decodes, sample_on_device(logits, rows), rows, logits, scores)
        spans = [QuerySpan(state.num_computed_tokens, 1, state.block_table) for state in batch]
        token_ids = torch.tensor([state.token_ids[-1] for state in batch], dtype=torch.int64)
        return LaunchedStep(batch, num_decodes, sample_on_device(self.runner.run_decodes(spans, token_ids), rows), rows)


def _row(state: SlotState, num_drafts: int, mask: Mask | None) -> SamplingRow:
    """Return the sampling parameters of the token after the first `num_drafts` draft tokens."""
    sequence = state.sequence
    edits = None if state.editor is None else state.edits(num_drafts)
    return SamplingRow(sequence.seed, len(state.token_ids) + num_drafts, sequence.params, edits, mask)


def _masks(state: SlotState, sampling: StepSampling) -> Sequence[Mask | None]:
    """Return the mask of each row to sample. Raises EngineError if masks are missing: no row is sampled unmasked."""
    if not state.sequence.is_constrained or not state.num_samples:
        return [None] * state.num_samples
    masks = sampling.masks.get(state.sequence.slot)
    if not masks:
        raise EngineError(f"Step {sampling.id} has no grammar mask for slot {state.sequence.slot}.")
    return [None if mask is None else np.frombuffer(mask, np.int32) for mask in masks]


def _chunk(state: SlotState) -> Chunk:
    start = state.num_computed_tokens
    token_ids = state.token_ids[start : start + state.num_tokens]
    num_logits = state.num_prompt_scores + state.num_samples
    return Chunk(token_ids + state.draft_ids, start, state.block_table, num_logits, state.pool)


def _accepted(draft_ids: Sequence[int], sampled: list[int]) -> list[int]:
    """Return the accepted drafts, which equal the `sampled` tokens, and the model's own next token."""
    agreed = next((index for index, token in enumerate(draft_ids) if token != sampled[index]), len(draft_ids))
    return sampled[: agreed + 1]


def _logprobs(
    logits: Tensor | None, sampled: Sequence[int], reported: dict[SlotState, range]
) -> dict[int, list[TokenLogprob]]:
    """Return the log-probabilities of the `reported` rows by slot, all looked up together."""
    assert logits is not None, "a step launched ahead keeps no logits"
    rows = [row for part in reported.values() for row in part]
    if len(rows) < len(logits):
        logits = logits[to_device(torch.tensor(rows), logits.device)]
    wanted = {state: state.sequence.params.logprobs or 0 for state in reported}
    scores = iter(log_probabilities(logits, [sampled[row] for row in rows], max(wanted.values())))
    return {
        state.sequence.slot: [
            TokenLogprob(score.logprob, score.top[: wanted[state]]) for score in islice(scores, len(part))
        ]
        for state, part in reported.items()
    }
