"""Plain decodes: what most requests do in most steps, namely to get one token, with nothing to decide about it.

At 256 sequences a step has little more than half a microsecond for each. So the share of such a request in a step is
not made anew for every step but kept (`RequestState.decode`), one token further on each time, until anything else is
to happen. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .kv_cache import KVCacheManager
from .request import RequestState, TokenOutput
from .scheduler import ScheduledRequest


def expect_decode(state: RequestState) -> None:
    """Keep the next share of a request that has just got a token, if only a plain decode can come of it."""
    request = state.request
    if state.grammar is None and request.params.logprobs is None and not request.draft_ids:
        state.decode = ScheduledRequest(state, state.num_computed_tokens, 1)


def append_tokens(
    batch: Iterable[ScheduledRequest], tokens: Sequence[int], cache: KVCacheManager
) -> tuple[list[TokenOutput], list[tuple[ScheduledRequest, int]]]:
    """Give every plain decode its token, from its row of `tokens`, unless it ends with it.

    Returns what came of that, and all others, each with the first of its rows.
    """
    outputs: list[TokenOutput] = []
    others: list[tuple[ScheduledRequest, int]] = []
    row = 0
    for item in batch:
        state = item.state
        if state.decode is item:
            token = tokens[row]
            known = item.start + 1
            if known < state.last_position and token not in state.end_ids:
                state.token_ids.append(token)
                state.num_computed_tokens = item.start = known
                if known == state.num_own_slots:
                    cache.register(state)
                outputs.append(
                    TokenOutput(state.request_id, [token], index=state.index, cached_tokens=state.num_cached_tokens)
                )
                row += 1
                continue
        others.append((item, row))
        row += item.num_samples
    return outputs, others
