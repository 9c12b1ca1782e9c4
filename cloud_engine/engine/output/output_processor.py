"""Output processing: appends a step's sampled tokens to the answers and finishes them.

Imports no torch: step results are plain data.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....protocol.responses import StopReason
from ..kv.kv_cache_manager import KVCacheManager
from ..scheduling.scheduler import Scheduler
from ..speculation.speculator import Speculator
from ..step import StepResult
from ..types.outputs import FinishReason, StepOutputs, TokenLogprob, TokenOutput
from ..types.request_state import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from ....text.grammars.state import GrammarState

_log = logging.getLogger("updraft.engine")


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

    def states(self, request_id: str) -> Sequence[RequestState]:
        """Return the unfinished answers of a request; none if the id is unknown."""
        return self._states.get(request_id, ())

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

    def process(self, batch: Sequence[ScheduledRequest], result: StepResult) -> StepOutputs:
        """Apply the result of the earliest unread step to its requests and return the new tokens.

        Requests that were dropped since the step's plan are ignored."""
        decoded, remaining, num_vain = self._scheduler.decodes.take(batch, result)
        self._counters.steps += 1
        self._counters.vain_rows += num_vain
        self._counters.generated_tokens += len(decoded.token_ids)
        outputs: list[TokenOutput] = []
        for item, tokens in remaining:
            state = item.state
            if result.prompt_scores:
                state.prompt_logprobs += result.prompt_scores.get(state.slot, ())
            if result.draft_computed:
                state.num_draft_computed_tokens = result.draft_computed.get(state.slot, state.num_draft_computed_tokens)
            if tokens:
                outputs.append(self._accept(item, tokens, result.logprobs.get(state.slot, ())))
                if self._held_back:
                    self._queue_siblings(state)
            else:
                outputs += self._catch_up(item, result.embeddings.get(state.slot))
        return StepOutputs(decoded, outputs)

    def _catch_up(self, item: ScheduledRequest, embedding: Sequence[float] | None) -> list[TokenOutput]:
        """Process a request that gets no token in this step. Returns an output only if this completes an embedding."""
        state = item.state
        if embedding is None:
            return []
        stats = state.stats()
        self._finish(state)
        return [TokenOutput(state.request_id, [], finish_reason="stop", stats=stats, embedding=tuple(embedding))]

    def _queue_siblings(self, first: RequestState) -> None:
        """Queue the answers that have waited for the prompt of the `first` answer."""
        for state in self._held_back.pop(first.request_id, ()):
            state.num_cached_tokens = first.num_cached_tokens
            self._scheduler.add(state)

    def _accept(self, item: ScheduledRequest, tokens: list[int], logprobs: Sequence[TokenLogprob]) -> TokenOutput:
        """Append `tokens`, the accepted draft tokens and the target's own next token, to the answer."""
        state = item.state
        begins, ends = state.num_generated_tokens == 0, tokens[-1] in state.end_ids
        new, finish_reason = _until_end(tokens, state)
        if state.grammar is not None:
            new = new[: _advance(state.grammar, new)]
            finish_reason = "error" if state.grammar.error else "stop" if state.grammar.complete else finish_reason
        length = state.until_repetition(new)
        repeats = bool(length) and (length < len(new) or finish_reason != "length")
        if repeats:
            new, finish_reason = new[:length], "length"
        num_accepted = min(len(tokens) - 1, len(new))
        self._speculator.record(item, num_accepted, ends=ends)
        state.has_begun = True
        state.num_computed_tokens -= item.num_planned_drafts - num_accepted
        state.token_ids.extend(new)
        state.prediction.advance(state.token_ids, len(new), len(item.draft_ids))
        self._counters.generated_tokens += len(new)
        stats = state.stats() if finish_reason else None
        scores = tuple(state.prompt_logprobs) if begins else ()
        error = state.grammar.error if state.grammar is not None else None
        cached = state.num_cached_tokens if begins else None
        output = TokenOutput(
            state.request_id,
            new,
            tuple(logprobs[: len(new)]),
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


def _advance(grammar: GrammarState, tokens: Sequence[int]) -> int:
    """Advance the grammar. If it raises, only this answer ends, with an error."""
    try:
        return grammar.advance(tokens)
    except Exception as error:  # noqa: BLE001 - the client of this answer gets the error
        _log.exception("A grammar failed; the other requests continue.")
        grammar.error = f"the grammar failed ({type(error).__name__}: {error})."
        return 0


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
    remaining = state.num_remaining_tokens
    tokens = tokens[:remaining]
    if not state.end_ids.isdisjoint(tokens):
        return tokens[: next(index for index, token in enumerate(tokens) if token in state.end_ids)], "stop"
    return tokens, "length" if len(tokens) == remaining else None
