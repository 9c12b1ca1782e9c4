"""A record of the latest steps, from which a fresh scheduler makes the same plans: hashes and times, no text.

The file has one JSON object per line: a `RecordHeader`, then a `StepRecord` per step. Block hashes are keyed with a
random key that is not kept, so they only tell which requests share a prefix.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....protocol.errors import ConfigurationError
from ..config import EngineConfig
from ..step import StepPlan, StepResult
from ..types.request_state import PrefixHashes, RequestState, ScheduledRequest

_LOG = logging.getLogger(__name__)
#: Steps kept. The file is cut when it has twice as many.
RECORDED_STEPS = 10_000


class RecordHeader(msgspec.Struct, frozen=True):
    """The first line: the settings of the scheduler. `window`: tokens in the attention window, and of a chunk.

    `fixed_rows`: as for `Scheduler`."""

    config: EngineConfig
    num_blocks: int
    window: tuple[int, int] | None
    fixed_rows: float


class Arrival(msgspec.Struct, frozen=True, tag=True):
    """A new request; `clock` is its arrival time, in `time.monotonic` seconds."""

    request: str
    clock: float
    num_prompt_tokens: int
    max_tokens: int
    n: int
    priority: int
    # Hash of the tenant, and its weight.
    tenant: str
    weight: float
    # Number of predicted tokens.
    num_predicted: int
    has_logprobs: bool
    scores_prompt: bool
    embed: bool
    is_constrained: bool
    detects_repetition: bool
    # Generated tokens of each answer that continues after a failure of the engine, by the answer's index.
    resumed: dict[int, int] = {}


class Removal(msgspec.Struct, frozen=True, tag=True):
    """An aborted request, or only its answer `index`."""

    request: str
    index: int | None


class StepRecord(msgspec.Struct):
    """One step, and the events before it."""

    events: list[Arrival | Removal]
    # Whether the engine was reset before the step.
    reset: bool
    # Start of the step, in `time.monotonic` seconds, and its duration in seconds.
    clock: float
    step_s: float = 0.0
    plan: str = ""
    # Whether the next step was launched before this step's result was read.
    overlaps: bool = False
    # Known tokens of each scheduled request before the step.
    lengths: list[int] = []
    # New tokens of each scheduled request. For answers that end, only the computed ones.
    counts: list[int] = []
    # Granted drafts: request, answer, drafter (None for a prediction) and number of tokens.
    drafts: list[tuple[str, int, str | None, int]] = []
    # Planned tokens of each granted draft: fewer if the grammar forbids some.
    planned: list[int] = []
    # `StepResult.draft_computed`.
    draft_computed: dict[int, int] = {}
    num_draft_tokens: int = 0
    # Answers that end with the step, by index in the batch.
    ended: list[int] = []
    # Block hashes of answers that have ended or were removed: request, index and hashes.
    blocks: list[tuple[str, int, list[str]]] = []
    # Whether the scheduler had nothing to compute before this step's result was read.
    is_alone: bool = False
    # Tokens of the answers that end, in the order of `ended`, and whether they might have become longer.
    final_lengths: list[tuple[int, bool]] = []


class StepRecorder:
    """Writes step records to a file that only this user can read. An older file is renamed to `NAME.previous`."""

    def __init__(self, path: Path, header: RecordHeader) -> None:
        """Create the file. Raises ConfigurationError if this is not possible."""
        self._path, self._block_size = path, header.config.block_size
        self._key = secrets.token_hex()
        self._header = msgspec.json.encode(header) + b"\n"
        self._num_steps, self._has_failed = 0, False
        self._drafting: list[ScheduledRequest] = []  # requests with drafts in the step that is being planned
        self._known: list[int] = []  # known tokens of each answer of the step that is being processed; -1 if it ended
        try:
            if path.exists():
                path.replace(path.with_name(f"{path.name}.previous"))
            self._replace(b"")
        except OSError as error:
            raise ConfigurationError(f"record_steps: {error}.", param="record_steps") from error
        self._steps = deque([StepRecord([], False, 0.0)])  # unfinished: the first gets the events and the next result

    def add(self, states: Sequence[RequestState]) -> None:
        """Record the arrival of a request, given its answers."""
        state, request = states[0], states[0].request
        arrival = Arrival(
            self._hash(request.request_id),
            state.arrived,
            state.num_prompt_tokens,
            state.max_tokens,
            request.n,
            request.priority,
            self._hash(request.tenant),
            request.weight,
            len(request.draft_ids),
            request.params.logprobs is not None,
            state.scores_prompt,
            request.embed,
            state.grammar is not None,
            state.detects_repetition,
            {} if request.resumed is None else {each.index: each.num_generated_tokens for each in states},
        )
        self._steps[0].events.append(arrival)

    def remove(self, request_id: str, index: int | None, states: Sequence[RequestState]) -> None:
        """Record an abort, given the request's unfinished answers."""
        self._steps[0].events.append(Removal(self._hash(request_id), index))
        self._steps[0].blocks += [self._blocks(state) for state in states if index in (None, state.index)]

    def reset(self) -> None:
        self._steps = deque([StepRecord([], True, 0.0)])

    def begin(self, batch: Sequence[ScheduledRequest]) -> None:
        """Record the scheduled batch, before its plan is built."""
        if self._steps[-1].plan:
            self._steps[-1].overlaps = True
            self._steps.append(StepRecord([], False, 0.0))
        step = self._steps[-1]
        step.clock = time.monotonic()
        step.lengths = [len(item.state.token_ids) for item in batch]
        self._drafting = [item for item in batch if item.num_drafts or item.draft_ids]
        step.drafts = [
            (self._hash(item.state.request_id), item.state.index, item.drafter, item.num_drafts or len(item.draft_ids))
            for item in self._drafting
        ]

    def pause(self) -> None:
        """Record that nothing was scheduled before the result of the last step is read."""
        self._steps[-1].is_alone = True

    def plan(self, plan: StepPlan) -> None:
        """Record the plan of the batch."""
        step = self._steps[-1]
        step.plan, step.planned = plan_hash(plan), [item.num_planned_drafts for item in self._drafting]

    def read(self, batch: Sequence[ScheduledRequest]) -> None:
        """Note the known tokens of each answer before the result is processed."""
        self._known = [len(item.state.token_ids) if item.state.slot >= 0 else -1 for item in batch]

    def end(self, batch: Sequence[ScheduledRequest], result: StepResult, num_draft_tokens: int, step_s: float) -> None:
        """Record the processed result, and write the step."""
        step = self._steps.popleft()
        if not self._steps:
            self._steps.append(StepRecord([], False, 0.0))
        step.step_s, step.num_draft_tokens = step_s, num_draft_tokens
        step.counts, step.draft_computed = list(result.counts), result.draft_computed
        for index, item in enumerate(batch):
            state = item.state
            if state.slot < 0 <= self._known[index]:
                step.ended.append(index)
                step.final_lengths.append((state.num_generated_tokens, state.num_remaining_tokens > 0))
                num_new = len(state.token_ids) - self._known[index]
                step.counts[index] = max(0, min(result.counts[index] - 1, num_new))
                step.blocks.append(self._blocks(state))
        try:
            self._write(msgspec.json.encode(step) + b"\n")
        except OSError as error:  # a full disk must not fail requests
            if not self._has_failed:
                _LOG.warning("Steps cannot be recorded: %s", error)
            self._has_failed = True

    def _write(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line)
        self._num_steps += 1
        if self._num_steps == 2 * RECORDED_STEPS:
            self._num_steps = RECORDED_STEPS
            self._replace(b"".join(self._path.read_bytes().splitlines(keepends=True)[-RECORDED_STEPS:]))

    def _replace(self, lines: bytes) -> None:
        """Replace the file by one with the header and `lines`."""
        draft = self._path.with_name(f"{self._path.name}.new")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(self._header + lines)
        draft.replace(self._path)

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key.encode()[:64], digest_size=8).hexdigest()

    def _blocks(self, state: RequestState) -> tuple[str, int, list[str]]:
        hashes = PrefixHashes(self._key + state.request.cache_salt)
        hashes.extend(state.token_ids, len(state.token_ids) // self._block_size, self._block_size)
        return self._hash(state.request_id), state.index, [block.hex()[:16] for block in hashes.hashes]


def plan_hash(plan: StepPlan) -> str:
    """Return a hash of all that the scheduler decided: everything but tokens and sampling parameters."""
    new = [(row.slot, len(row.token_ids), row.num_computed_tokens, row.block_table) for row in plan.new]
    decided = (plan.id, plan.slots, plan.counts, plan.num_decodes, new, plan.new_blocks, plan.ended, plan.grants)
    return hashlib.blake2b(msgspec.msgpack.encode(decided), digest_size=8).hexdigest()
