"""The worker: holds the sequences of all slots, and executes step plans on the model.

A step can be launched while the result of the step before it is unread. Its input tokens and true positions are then
taken from that step on the device (`LaunchedStep.unread`).
"""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from msgspec.structs import replace

from ....kernels.attention.ragged_batch import Ints, repeated
from ....kernels.runtime.transfer import HostCopy, to_device
from ....protocol.errors import EngineError
from ....text.grammars.state import Mask
from ....text.logit_edits import LogitEdits
from ...models.sharding import ALONE, ModelGroup
from ..rank_messages import LaunchStep, ReadStep, SampleStep
from ..step import DraftProposal, StepPlan, StepResult, StepSampling
from ..types.outputs import TokenLogprob
from .launched_step import NO_DRAFT, LaunchedStep, score_prompts
from .model_runner import ForwardBatch, Runner
from .sampler import SamplingRows, UnreadLogprobs, sample
from .slots import CONSTRAINED, EDITED, EMBEDDED, REPORTED, SCORED, RowsOf, Slots, SlotState

#: Runs the drafters over sequences, which they fill with draft tokens (`Speculator.propose`).
Propose = Callable[[Sequence[SlotState], RowsOf], None]
#: Returns the mask of a slot after draft tokens; None if the slot has no grammar.
MaskAfter = Callable[[int, Sequence[int]], Mask | None]


_NONE = np.zeros(0, np.int64)


class Worker:
    """Executes each plan by `launch`, `sample` and `read`. The next plan may be launched before `read`."""

    def __init__(
        self, runner: Runner, propose: Propose, new_slots: Callable[[], Slots], group: ModelGroup = ALONE
    ) -> None:
        self.runner = runner
        self.group = group
        self._propose = propose
        self._new_slots = new_slots
        self.slots = new_slots()
        self._launched: deque[LaunchedStep] = deque()  # unread steps: at most two

    def reset(self) -> None:
        """Drop all sequences and steps, after a failed step."""
        self.slots, self._launched = self._new_slots(), deque()

    def launch(self, plan: StepPlan, mask_after: MaskAfter) -> dict[int, DraftProposal]:
        """Apply the plan's changes, run the drafters, and launch the forward pass. Returns the drafts by slot."""
        self._apply(plan)
        slots, counts = np.array(plan.slots, np.int64), np.array(plan.counts, np.int64)
        num_drafts, proposals = self._draft(plan, slots, counts, mask_after)
        if not self.group.is_alone:
            self.group.tell(LaunchStep(replace(plan, drafts=self.slots.drafts, grants={})))
        self._launched.append(self._forward(slots, counts, num_drafts))
        return proposals

    def sample(self, sampling: StepSampling) -> None:
        """Sample the tokens of the last launched step. The step before it has been read.

        Raises EngineError if a constrained row has no mask."""
        self.group.tell(SampleStep(sampling))
        step, slots = self._launched[-1], self.slots
        masks = self._masks(step, sampling)
        if not self.group.is_last:
            return
        sequence, number = step.sequence, step.number
        rows = SamplingRows(
            slots.options[:, step.slots[sequence]],
            slots.num_known[step.slots][sequence] + number,
            masks,
            self._edits(step),
        )
        step.sampled_by(sample(step.logits, rows))
        step.logprobs = self._logprobs(step)

    def read(self, plan: StepPlan, told: list[int] | None = None) -> StepResult:
        """Wait for the earliest unread step, accept drafts and append the new tokens to the sequences.

        `told`: the tokens that rank 0 sampled, in a rank that follows it. Raises EngineError if they differ here.
        """
        step, slots = self._launched.popleft(), self.slots
        if told is not None and not self.group.is_last:
            step.sampled_by(torch.tensor(told, dtype=torch.int64))
        tokens, accepted = step.read()
        if told is not None and tokens != told:
            raise EngineError("This rank sampled other tokens than rank 0.")
        self.group.tell(ReadStep(tokens))
        counts, sequence, number, new = step.num_samples, step.sequence, step.number, np.array(tokens, np.int64)
        if accepted is not None:
            counts = np.minimum(counts, accepted + 1)
            kept = number < counts[sequence]
            sequence, number, new = sequence[kept], number[kept], new[kept]
            tokens = new.tolist()
            slots.num_computed[step.slots] -= (step.num_drafts - accepted) * step.live
        live = step.live[sequence]  # other slots may have new sequences
        of_row = step.slots[sequence[live]]
        slots.tokens[of_row, slots.num_known[of_row] + number[live]] = new[live]
        slots.num_known[step.slots] += counts * step.live
        draft_computed = self._draft_computed(step, plan.num_decodes)
        prompt_scores = {slot: each.read() for slot, each in step.prompt_scores.items()}
        embeddings = {slot: each.tolist() for slot, each in step.embeddings.items()}
        logprobs = self._read_logprobs(step, counts)
        return StepResult(plan.id, counts.tolist(), tokens, logprobs, prompt_scores, embeddings, draft_computed)

    def _apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the slots."""
        if plan.ended:
            self.slots.end(plan.ended)
            for step in self._launched:
                step.drop(plan.ended)
        for sequence in plan.new:
            self.slots.begin(sequence)
        tables = [(sequence.slot, 0, sequence.block_table) for sequence in plan.new]
        self.slots.tables.replace([*tables, *((new.slot, new.start, new.blocks) for new in plan.new_blocks)])

    def _draft(
        self, plan: StepPlan, slots: Ints, counts: Ints, mask_after: MaskAfter
    ) -> tuple[Ints, dict[int, DraftProposal]]:
        """Run the drafters, and write all draft tokens after the tokens to compute. Returns their numbers, and the
        proposals."""
        held, num_drafts = self.slots, np.zeros_like(counts)
        drafts: Mapping[int, list[int]] = plan.drafts
        proposals: dict[int, DraftProposal] = {}
        ends = held.num_computed[slots] + counts
        if plan.grants or (ends < held.num_known[slots]).any():
            proposals = self._proposals(plan, slots[plan.num_decodes :], mask_after)
            drafts = {**drafts, **{slot: proposal.token_ids for slot, proposal in proposals.items()}}
        held.drafts = drafts
        if drafts:
            index = {slot: at for at, slot in enumerate(plan.slots[plan.num_decodes :], plan.num_decodes)}
            places = [index[slot] for slot in drafts]
            num_drafts[places] = lengths = np.array([len(token_ids) for token_ids in drafts.values()])
            sequence, number = repeated(lengths)
            at = np.array(places)[sequence]
            held.tokens[slots[at], ends[at] + number] = list(chain.from_iterable(drafts.values()))
        return num_drafts, proposals

    def _proposals(self, plan: StepPlan, other_slots: Ints, mask_after: MaskAfter) -> dict[int, DraftProposal]:
        """Run the drafters over the sequences that do more than decode. Returns the proposals by slot."""
        other_states = [self.slots.states[slot] for slot in other_slots.tolist()]
        for state, count in zip(other_states, plan.counts[plan.num_decodes :], strict=True):
            slot = state.sequence.slot
            grant = plan.grants.get(slot)
            state.num_tokens, state.draft_ids, state.draft_ends = count, list(plan.drafts.get(slot, ())), False
            state.drafter, state.num_drafts = (None, 0) if grant is None else (grant.drafter, grant.num_drafts)

        def rows_of(states: Sequence[SlotState]) -> SamplingRows:
            slots = [state.sequence.slot for state in states]
            positions = self.slots.num_known[slots] + [len(state.draft_ids) for state in states]
            masks, edits = dict[int, Mask](), dict[int, LogitEdits]()
            for row, state in enumerate(states):
                if state.sequence.is_constrained and (mask := mask_after(slots[row], state.draft_ids)) is not None:
                    masks[row] = mask
                if (edit := state.edits(state.draft_ids)) is not None:
                    edits[row] = edit
            return SamplingRows(self.slots.options[:, slots], positions, masks, edits)

        self._propose([state for state in other_states if not state.sequence.embed], rows_of)
        return {
            state.sequence.slot: DraftProposal(state.draft_ids, state.draft_ends)
            for state in other_states
            if state.drafter
        }

    def _forward(self, slots: Ints, counts: Ints, num_drafts: Ints) -> LaunchedStep:
        """Launch the forward pass, and advance the sequences as if all drafts were accepted."""
        held = self.slots
        unread = self._launched[-1].unread(slots, len(held.num_known)) if self._launched else None
        start, rows = held.num_computed[slots], counts + num_drafts
        ends = start + counts
        samples = np.where(ends >= held.num_known[slots], 1 + num_drafts, 0)
        embedded = held.with_need(EMBEDDED, slots)
        complete = [state for at, state in embedded if samples[at] and self.group.is_last]
        samples[[at for at, _ in embedded]] = 0
        scored, scores = held.with_need(SCORED, slots), np.zeros_like(samples)
        for at, state in scored:
            scores[at] = state.num_prompt_scores(int(start[at]), int(ends[at]))
        batch = held.batch(slots, start, rows)
        sequence, number = batch.row_places
        token_ids = held.tokens[slots[sequence], batch.positions()].astype(np.int64)
        drafts = np.append(token_ids[1:], NO_DRAFT)
        drafts[batch.first_row[1:] - 1] = NO_DRAFT  # the last row of each sequence
        logit_rows: Ints | None = None
        if not np.array_equal(samples, rows):  # tokens of prompts have no logits
            logit_rows = np.flatnonzero(number >= (rows - samples - scores)[sequence])
            sampled_rows = np.flatnonzero(number >= (rows - samples)[sequence])
            sequence, drafts = sequence[sampled_rows], drafts[sampled_rows]
            number = number[sampled_rows] - (rows - samples)[sequence]
        logits = self.runner.compute(ForwardBatch(batch, torch.from_numpy(token_ids), logit_rows, embedded), unread)
        logits, prompt_scores = score_prompts(scored if self.group.is_last else (), logits, scores, samples)
        held.num_computed[slots] += rows
        return LaunchedStep(
            slots,
            num_drafts,
            samples,
            drafts,
            sequence,
            number,
            logits,
            prompt_scores,
            {state.sequence.slot: HostCopy(state.embedding()) for state in complete},
        )

    def _draft_computed(self, step: LaunchedStep, num_decodes: int) -> dict[int, int]:
        """Return how many tokens the draft model has computed of the sequences that do more than decode, by slot."""
        computed: dict[int, int] = {}
        for slot in step.slots[num_decodes:][step.live[num_decodes:]].tolist():
            state = self.slots.states[slot]
            if state.num_draft_computed_tokens:
                known = min(state.num_computed_tokens, state.num_known_tokens)
                computed[slot] = state.num_draft_computed_tokens = min(state.num_draft_computed_tokens, known)
        return computed

    def _masks(self, step: LaunchedStep, sampling: StepSampling) -> dict[int, Mask]:
        """Return the grammar masks by row. Rows after a mask's end are not sampled.

        Raises EngineError if masks are missing: no row is sampled unmasked."""
        slots = self.slots
        constrained = [
            (at, state.sequence.slot) for at, state in slots.with_need(CONSTRAINED, step.slots) if step.num_samples[at]
        ]
        if not constrained:
            return {}
        allowed: dict[int, list[bytes | None]] = {}
        for at, slot in constrained:
            allowed[at] = [] if slot in sampling.dropped else sampling.masks.get(slot) or []
            if not allowed[at] and slot not in sampling.dropped:
                raise EngineError(f"Step {sampling.id} has no grammar mask for slot {slot}.")
        step.cut({at: len(masks) for at, masks in allowed.items()})
        first_row = step.first_row
        return {
            int(first_row[at]) + number: np.frombuffer(mask, np.int32)
            for at, masks in allowed.items()
            for number, mask in enumerate(masks)
            if mask is not None
        }

    def _edits(self, step: LaunchedStep) -> dict[int, LogitEdits]:
        """Return the logit edits by row."""
        slots, edits = self.slots, dict[int, LogitEdits]()
        edited = slots.with_need(EDITED, step.slots)
        first_row = step.first_row if edited else step.slots
        for at, state in edited:
            first, number = int(first_row[at]), int(step.num_samples[at])
            drafts: list[int] = step.drafts[first : first + max(0, number - 1)].tolist()
            for row in range(number):
                if (edit := state.edits(drafts[:row])) is not None:
                    edits[first + row] = edit
        return edits

    def _logprobs(self, step: LaunchedStep) -> UnreadLogprobs | None:
        """Look up the sampled tokens of the sequences that report log-probabilities, all together."""
        slots = self.slots
        reported = slots.with_need(REPORTED, step.slots)
        rows = np.flatnonzero((slots.needs[step.slots] & REPORTED)[step.sequence]) if reported else _NONE
        if not len(rows):
            return None
        logits, sampled = step.logits, step.sampled
        if len(rows) < len(logits):
            chosen = to_device(torch.from_numpy(rows), logits.device)
            logits, sampled = logits.index_select(0, chosen), sampled.index_select(0, chosen)
        step.reported = {at: (state.sequence.slot, state.sequence.params.logprobs or 0) for at, state in reported}
        return UnreadLogprobs(logits, sampled, max(wanted for _, wanted in step.reported.values()))

    def _read_logprobs(self, step: LaunchedStep, counts: Ints) -> dict[int, list[TokenLogprob]]:
        """Return the log-probabilities of the new tokens, `counts` of each sequence, by slot."""
        if step.logprobs is None:
            return {}
        scores, start = step.logprobs.read(), 0
        most = max(wanted for _, wanted in step.reported.values())
        logprobs: dict[int, list[TokenLogprob]] = {}
        for at, (slot, wanted) in step.reported.items():
            kept = scores[start : start + int(counts[at])]
            logprobs[slot] = (
                kept if wanted == most else [TokenLogprob(score.logprob, score.top[:wanted]) for score in kept]
            )
            start += int(step.num_samples[at])
        return logprobs
