"""The prefix cache finds the longest prefix there is, and hashes nothing that nobody asks for."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState
from updraft.protocol.sampling import ResolvedParams

BLOCK = 2
SALTS = ["", "a"]


def make_state(prompt: list[int], salt: str = "") -> RequestState:
    request = GenerationRequest("r", prompt, cache_salt=salt)
    return RequestState(request, 9, ResolvedParams(), 0, frozenset(), list(prompt), PredictionCursor([]))


def compute(cache: KVCacheManager, state: RequestState, num_tokens: int = 1000) -> None:
    """As steps do: up to `num_tokens` more of the known tokens."""
    state.num_computed_tokens = min(len(state.token_ids), state.num_computed_tokens + num_tokens)
    cache.register(state)


class EverythingIsFound(RuleBasedStateMachine):
    """A request finds exactly what others with its salt have computed, while nothing is ever evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCacheManager(3000, BLOCK)
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.computed: set[tuple[str, tuple[int, ...]]] = set()

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(SALTS))
    def add(self, prompt: list[int], salt: str) -> None:
        self.waiting.append(make_state(prompt, salt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(state)
        assert self.cache.admit(state)
        ends = range(0, len(state.token_ids), BLOCK)
        known = [
            end for end in ends if end and (state.request.cache_salt, tuple(state.token_ids[:end])) in self.computed
        ]
        assert state.num_computed_tokens == max(known, default=0)
        self.running.append(state)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), others=st.lists(st.integers(0, 1), max_size=3))
    def step(self, data: st.DataObject, num_tokens: int, others: list[int]) -> None:
        state = data.draw(st.sampled_from(self.running))
        compute(self.cache, state, num_tokens)
        for end in range(BLOCK, state.num_computed_tokens + 1, BLOCK):
            self.computed.add((state.request.cache_salt, tuple(state.token_ids[:end])))
        if state.num_computed_tokens == len(state.token_ids) < 20:
            state.token_ids += others
            assert self.cache.grow(state, len(state.token_ids))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempted=st.booleans())
    def leave(self, data: st.DataObject, preempted: bool) -> None:
        state = data.draw(st.sampled_from(self.running))
        self.running.remove(state)
        self.cache.free(state)
        if preempted:
            self.waiting.append(state)


EverythingIsFound.TestCase.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestEverythingIsFound = EverythingIsFound.TestCase


def test_unshared_blocks_are_not_hashed() -> None:
    cache = KVCacheManager(100, BLOCK)
    alone = make_state([number % 7 for number in range(40)])
    assert cache.admit(alone)
    compute(cache, alone)
    assert len(alone.prefix.hashes) == 1
    other = make_state([*alone.token_ids[:10], 8, 8, 8, 8])
    assert cache.admit(other)
    assert other.num_computed_tokens == 10
    assert len(alone.prefix.hashes) == 20, "somebody asked"


def test_a_finished_request_is_found_until_its_blocks_are_needed() -> None:
    cache = KVCacheManager(10, BLOCK)
    first = make_state([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.admit(first)
    compute(cache, first)
    cache.free(first)
    other = make_state([0] * 15)  # takes the five that were never used, the one that was not full, and the two deepest
    assert cache.admit(other)
    again = make_state(list(first.token_ids))
    assert not cache.admit(again), "five blocks, of which there are two"
    cache.free(other)
    assert cache.admit(again)
    assert again.num_computed_tokens == 4


def test_request_without_its_first_block_starts_anew() -> None:
    cache = KVCacheManager(6, BLOCK)
    state = make_state([1, 2, 3, 4, 5])
    assert cache.admit(state)
    compute(cache, state)
    cache.free(state)  # preempted
    other = make_state([7] * 12)
    assert cache.admit(other)
    cache.free(other)
    twin = make_state([1, 2, 8])
    assert cache.admit(twin)
    assert twin.num_computed_tokens == 0
    compute(cache, twin)
    assert cache.admit(state)
    assert state.num_computed_tokens == 2, "what the twin has computed"
    compute(cache, state)
    late = make_state([1, 2, 3, 4, 9])
    assert cache.admit(late)
    assert late.num_computed_tokens == 4
