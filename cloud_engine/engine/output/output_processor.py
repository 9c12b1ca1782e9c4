"""Output processing: appends a step's sampled tokens to the answers and finishes them.

Imports no torch: everything about logits goes through `StepResult`, so that tests can use plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....protocol.responses import StopReason
from ..kv.kv_cache_manager import KVCacheManager
from ..scheduling.scheduler import Scheduler
from ..speculation.speculator import Speculator
from ..types.outputs import FinishReason, StepOutputs, TokenOutput
from ..types.request_state import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from ..execution.step_result import StepResult


class OutputProcessor:
    """Tracks all unfinished answers and applies the result of each step to them."""

    def __init__(self, scheduler: Scheduler, cache: KVCacheManager, speculator: Speculator) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._speculator = speculator
        self._counters = scheduler.counters
        self._states: dict[str, list[RequestState]] = {}  # request id -> answers
        self._held_back: dict[str, list[RequestState]] = {}  # request id -> answers that wait for the prompt's blocks
        self._streamed: set[str] = set()

    def __len__(self) -> int:
        """Return the number of unfinished requests (not answers)."""
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def are_streamed(self) -> bool:
        """Return whether a client streams any of the answers."""
        return bool(self._streamed)

    def request_ids(self) -> list[str]:
        return list(self._states)

    def begin(self, states: Sequence[RequestState]) -> None:
        """Queue the first answer of a request. The others follow when the first has computed the prompt."""
        first, *siblings = states
        self._scheduler.add(first)
        self._states[first.request_id] = [first, *siblings]
        if siblings:
            self._held_back[first.request_id] = siblings
        if first.request.streamed:
            self._streamed.add(first.request_id)

    def drop(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request, or only answer `index`, and free its blocks. Return whether the whole request was dropped."""
        states = self._states.get(request_id, [])
        if states:
            self._queue_siblings(states[0])
        remaining = [state for state in states if index is not None and state.index != index]
        for state in states:
            if state not in remaining:
                self._remove(state)
        if remaining:
            self._states[request_id] = remaining
            return False
        return self._forget(request_id)

    def process(self, batch: Sequence[ScheduledRequest], samples: StepResult) -> StepOutputs:
        """Apply the result of a step to its requests and return the new tokens."""
        decoded, remaining = self._scheduler.decodes.take(batch, samples.tokens)
        self._counters.steps += 1
        self._counters.generated_tokens += len(decoded.token_ids)
        outputs: list[TokenOutput] = []
        for item, row in remaining:
            if item.num_samples:
                outputs.append(self._accept(item, row, samples))
                self._queue_siblings(item.state)
            else:
                outputs += self._catch_up(item)
        return StepOutputs(decoded, outputs)

    def _catch_up(self, item: ScheduledRequest) -> list[TokenOutput]:
        """Advance a request that gets no token in this step. Returns an output only if this completes an embedding."""
        state, is_done = item.state, item.is_caught_up
        state.num_computed_tokens += item.num_tokens
        self._cache.register(state)
        if state.pool is None or not is_done:
            return []
        stats = state.stats()
        self._finish(state)
        return [
            TokenOutput(state.request_id, [], finish_reason="stop", stats=stats, embedding=tuple(state.pool.vector()))
        ]

    def _queue_siblings(self, first: RequestState) -> None:
        """Queue the answers that have waited for the prompt of the `first` answer."""
        for state in self._held_back.pop(first.request_id, ()):
            state.num_cached_tokens = first.num_cached_tokens
            self._scheduler.add(state)

    def _accept(self, item: ScheduledRequest, row: int, samples: StepResult) -> TokenOutput:
        """Append the accepted draft tokens and the target's own next token to the answer."""
        state, sampled = item.state, samples.tokens[row : row + item.num_samples]
        begins = state.num_generated_tokens == 0
        num_accepted = next((i for i, token in enumerate(item.draft_ids) if token != sampled[i]), len(item.draft_ids))
        ends = sampled[num_accepted] in state.end_ids
        new, finish_reason = _until_end(sampled[: num_accepted + 1], state)
        if state.grammar is not None:
            new = new[: state.grammar.advance(new)]
            finish_reason = "error" if state.grammar.error else "stop" if state.grammar.complete else finish_reason
        length = state.until_repetition(new)
        repeats = bool(length) and (length < len(new) or finish_reason != "length")
        if repeats:
            new, finish_reason = new[:length], "length"
        num_accepted = min(num_accepted, len(new))
        self._speculator.record(item, num_accepted, ends=ends)
        state.has_begun = True
        state.num_computed_tokens = len(state.token_ids) + num_accepted
        state.num_draft_computed_tokens = min(state.num_draft_computed_tokens, state.num_computed_tokens)
        state.token_ids.extend(new)
        state.prediction.advance(state.token_ids, len(new), len(item.draft_ids))
        num_top = state.request.params.logprobs
        logprobs = () if num_top is None or not new else samples.logprobs(range(row, row + len(new)), num_top)
        self._counters.generated_tokens += len(new)
        stats = state.stats() if finish_reason else None
        scores = tuple(state.prompt_logprobs) if begins else ()
        error = state.grammar.error if state.grammar is not None else None
        cached = state.num_cached_tokens if begins else None
        output = TokenOutput(
            state.request_id,
            new,
            logprobs,
            finish_reason,
            stats,
            state.index,
            scores,
            error,
            cached,
            stop_reason="repetition_detected" if repeats else _stop_reason(state, finish_reason),
        )
        if stats is not None:
            self._finish(state)
        else:
            self._cache.register(state)
            self._cache.trim(state)
            self._scheduler.decodes.join(state)
        return output

    def _finish(self, state: RequestState) -> None:
        self._remove(state)
        self._states[state.request_id].remove(state)
        if not self._states[state.request_id]:
            self._forget(state.request_id)
            self._counters.finished_requests += 1

    def _forget(self, request_id: str) -> bool:
        self._streamed.discard(request_id)
        return self._states.pop(request_id, None) is not None

    def _remove(self, state: RequestState) -> None:
        """Remove a finished or aborted answer; if it has begun, count the accepted and rejected predicted tokens."""
        self._scheduler.remove(state)
        if state.has_begun:
            accepted = state.prediction.num_accepted
            self._counters.accepted_prediction_tokens += accepted
            self._counters.rejected_prediction_tokens += len(state.request.draft_ids) - accepted


def cut_drafts(batch: Sequence[ScheduledRequest]) -> None:
    """Truncate drafts at the first token that the request's grammar forbids."""
    for item in batch:
        if item.draft_ids and item.state.grammar is not None:
            num_allowed = item.state.grammar.num_allowed(item.draft_ids)
            item.draft_ends = item.draft_ends and num_allowed == len(item.draft_ids)
            del item.draft_ids[num_allowed:]


def _stop_reason(state: RequestState, reason: FinishReason | None) -> StopReason | None:
    return "default_max_tokens" if reason == "length" and state.request.params.max_tokens is None else None


def _until_end(tokens: list[int], state: RequestState) -> tuple[list[int], FinishReason | None]:
    """Return `tokens` up to the end of the answer, and the finish reason if it ends within them."""
    tokens = tokens[: state.num_remaining_tokens]
    for index, token in enumerate(tokens):
        if token in state.end_ids:
            return tokens[:index], "stop"
    return tokens, "length" if len(tokens) == state.num_remaining_tokens else None
