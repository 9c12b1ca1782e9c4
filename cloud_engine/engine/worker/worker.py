"""The worker: holds the sequences of all slots, and executes step plans on the model.

A step can be launched while the result of the step before it is unread. Its input tokens and true positions are then
taken from that step on the device (`LaunchedStep.unread`).
"""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.types import QuerySpan
from ....protocol.errors import EngineError
from ....text.grammars.state import Mask
from ..step import DraftProposal, StepPlan, StepResult, StepSampling
from ..types.outputs import TokenLogprob
from ..types.pooling import MeanPool
from ..types.sampling_row import RowOf, SamplingRow
from ..types.slot_state import SlotState
from .host_device_copy import HostCopy, to_device
from .launched_step import LaunchedPart, LaunchedStep
from .model_runner import Chunk, Runner
from .prompt_logprobs import score_prompts
from .sampler import UnreadLogprobs, sample_on_device

#: Runs the drafters over sequences, which they fill with draft tokens (`Speculator.propose`).
Propose = Callable[[Sequence[SlotState], RowOf], None]
#: Returns the mask of a slot after draft tokens; None if the slot has no grammar.
MaskAfter = Callable[[int, Sequence[int]], Mask | None]


class Worker:
    """Executes each plan by `launch`, `sample` and `read`. The next plan may be launched before `read`."""

    def __init__(self, runner: Runner, propose: Propose) -> None:
        self.runner = runner
        self._propose = propose
        self._states: dict[int, SlotState] = {}
        self._slots: list[int] = []
        self._batch: list[SlotState] = []  # sequences of `_slots`, the last launched step's
        self._launched: deque[LaunchedStep] = deque()  # unread steps: at most two

    def reset(self) -> None:
        """Drop all sequences and steps, after a failed step."""
        self._states, self._slots, self._batch, self._launched = {}, [], [], deque()

    def launch(self, plan: StepPlan, mask_after: MaskAfter) -> dict[int, DraftProposal]:
        """Apply the plan's changes, run the drafters, and launch the forward pass. Returns the drafts by slot."""
        self._apply(plan)
        if plan.new or plan.slots != self._slots:
            self._slots, self._batch = plan.slots, [self._states[slot] for slot in plan.slots]
        other_states = self._batch[plan.num_decodes :]
        proposals = self._draft(plan, other_states, mask_after) if other_states else {}
        self._launched.append(self._forward(self._batch, plan.num_decodes))
        return proposals

    def sample(self, sampling: StepSampling) -> None:
        """Sample the tokens of the last launched step. The step before it has been read.

        Raises EngineError if a constrained row has no mask."""
        step = self._launched[-1]
        rows = [_row(state, (), None) for state in step.decodes]
        kept: list[int] = []  # indices of the logits to sample from
        num_logits = len(rows)
        for part in step.parts:
            part.first_row = len(rows)
            masks = _masks(part, sampling)
            rows += [_row(part.state, part.draft_ids[:number], mask) for number, mask in enumerate(masks)]
            kept += range(num_logits, num_logits + len(masks))
            num_logits += part.num_samples
            part.num_samples = len(masks)
        logits = step.logits
        if len(rows) < len(logits):
            chosen = [*range(len(step.decodes)), *kept]
            logits = logits[to_device(torch.tensor(chosen, dtype=torch.int64), logits.device)]
        step.sampled_by(sample_on_device(logits, rows))
        reported = [part for part in step.parts if part.state.sequence.params.logprobs is not None]
        step.logprobs = _logprobs(logits, step.sampled, reported)

    def read(self, plan: StepPlan) -> StepResult:
        """Wait for the earliest unread step, accept drafts and append the new tokens to the sequences."""
        step = self._launched.popleft()
        sampled, num_decodes = step.read(), len(step.decodes)
        for state, token in zip(step.decodes, sampled, strict=False):
            state.token_ids.append(token)
        if not step.parts:
            return StepResult(plan.id, plan.counts, sampled)
        counts, tokens = [1] * num_decodes, sampled[:num_decodes]
        logprobs: dict[int, list[TokenLogprob]] = {}
        draft_computed: dict[int, int] = {}
        scores = iter(step.logprobs.read() if step.logprobs is not None else ())
        for part in step.parts:
            state, row = part.state, part.first_row
            new = _accepted(part.draft_ids, sampled[row : row + part.num_samples])
            if (wanted := state.sequence.params.logprobs) is not None and part.num_samples:
                looked_up = list(islice(scores, part.num_samples))
                logprobs[state.sequence.slot] = [
                    TokenLogprob(score.logprob, score.top[:wanted]) for score in looked_up[: len(new)]
                ]
            state.num_computed_tokens -= len(part.draft_ids) - max(0, len(new) - 1)
            state.token_ids += new
            computed = min(state.num_computed_tokens, len(state.token_ids))
            state.num_draft_computed_tokens = min(state.num_draft_computed_tokens, computed)
            if state.num_draft_computed_tokens:
                draft_computed[state.sequence.slot] = state.num_draft_computed_tokens
            counts.append(len(new))
            tokens += new
        prompt_scores = {slot: each.read() for slot, each in step.prompt_scores.items()}
        embeddings = {slot: each.tolist() for slot, each in step.embeddings.items()}
        return StepResult(plan.id, counts, tokens, logprobs, prompt_scores, embeddings, draft_computed)

    def _apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the slots."""
        for slot in plan.ended:
            del self._states[slot]
        for sequence in plan.new:
            self._states[sequence.slot] = SlotState(sequence, MeanPool() if sequence.embed else None)
        for new in plan.new_blocks:
            self._states[new.slot].block_table[new.start :] = array("q", new.blocks)

    def _draft(
        self, plan: StepPlan, other_states: Sequence[SlotState], mask_after: MaskAfter
    ) -> dict[int, DraftProposal]:
        """Set what the plan's step computes of `other_states`, and run the drafters."""
        for state, count in zip(other_states, plan.counts[plan.num_decodes :], strict=True):
            slot = state.sequence.slot
            state.num_tokens, state.draft_ends = count, False
            state.draft_ids += plan.drafts.get(slot, ())
            grant = plan.grants.get(slot)
            state.drafter, state.num_drafts = (None, 0) if grant is None else (grant.drafter, grant.num_drafts)

        def row_of(state: SlotState, num_drafts: int) -> SamplingRow:
            draft_ids = state.draft_ids[:num_drafts]
            sequence = state.sequence
            return _row(state, draft_ids, mask_after(sequence.slot, draft_ids) if sequence.is_constrained else None)

        self._propose([state for state in other_states if not state.sequence.embed], row_of)
        return {
            state.sequence.slot: DraftProposal(state.draft_ids, state.draft_ends)
            for state in other_states
            if state.drafter
        }

    def _forward(self, batch: Sequence[SlotState], num_decodes: int) -> LaunchedStep:
        """Launch the forward pass, and advance the sequences as if all drafts were accepted."""
        decodes, other_states = batch[:num_decodes], batch[num_decodes:]
        unread = self._launched[-1].unread(batch) if self._launched else None
        if not other_states:
            spans = [QuerySpan(state.num_computed_tokens, 1, state.block_table) for state in decodes]
            token_ids = torch.tensor([state.token_ids[-1] for state in decodes], dtype=torch.int64)
            logits = self.runner.run_decodes(spans, token_ids, unread)
            for state in decodes:
                state.num_computed_tokens += 1
            return LaunchedStep(decodes, [], logits)
        logits = self.runner.run([_chunk(state) for state in batch], unread)
        logits, scores = score_prompts(batch, logits)
        parts = [LaunchedPart(state, state.draft_ids, state.num_samples) for state in other_states]
        embeddings = {
            state.sequence.slot: HostCopy(state.pool.vector())
            for state in other_states
            if state.pool is not None and state.is_caught_up
        }
        for state in decodes:
            state.num_computed_tokens += 1
        for state in other_states:
            state.num_computed_tokens += state.num_tokens + len(state.draft_ids)
            state.num_tokens, state.unread_drafts, state.draft_ids = 1, state.draft_ids, []
        return LaunchedStep(decodes, parts, logits, scores, embeddings)


def _row(state: SlotState, draft_ids: Sequence[int], mask: Mask | None) -> SamplingRow:
    """Return the sampling parameters of the token after `draft_ids`."""
    sequence = state.sequence
    edits = None if state.editor is None else state.edits(draft_ids)
    return SamplingRow(sequence.seed, len(state.token_ids) + len(draft_ids), sequence.params, edits, mask)


def _masks(part: LaunchedPart, sampling: StepSampling) -> Sequence[Mask | None]:
    """Return the mask of each row to sample. Raises EngineError if masks are missing: no row is sampled unmasked."""
    sequence = part.state.sequence
    if not sequence.is_constrained or not part.num_samples:
        return [None] * part.num_samples
    if sequence.slot in sampling.dropped:
        return []
    masks = sampling.masks.get(sequence.slot)
    if not masks:
        raise EngineError(f"Step {sampling.id} has no grammar mask for slot {sequence.slot}.")
    return [None if mask is None else np.frombuffer(mask, np.int32) for mask in masks]


def _chunk(state: SlotState) -> Chunk:
    """Return the tokens to compute. If the first is unread, its place is held by another token."""
    start = state.num_computed_tokens
    token_ids = state.token_ids[start : start + state.num_tokens] or state.token_ids[-1:]
    num_logits = state.num_prompt_scores + state.num_samples
    return Chunk(token_ids + state.draft_ids, start, state.block_table, num_logits, state.pool)


def _accepted(draft_ids: Sequence[int], sampled: list[int]) -> list[int]:
    """Return the accepted drafts, which equal the `sampled` tokens, and the model's own next token."""
    verified = draft_ids[: max(0, len(sampled) - 1)]
    agreed = next((index for index, token in enumerate(verified) if token != sampled[index]), len(verified))
    return sampled[: agreed + 1]


def _logprobs(logits: Tensor, sampled: Tensor, reported: Sequence[LaunchedPart]) -> UnreadLogprobs | None:
    """Look up the sampled tokens of the `reported` sequences, all together."""
    rows = [row for part in reported for row in range(part.first_row, part.first_row + part.num_samples)]
    if not rows:
        return None
    if len(rows) < len(logits):
        chosen = to_device(torch.tensor(rows), logits.device)
        logits, sampled = logits[chosen], sampled[chosen]
    return UnreadLogprobs(logits, sampled, max(part.state.sequence.params.logprobs or 0 for part in reported))
