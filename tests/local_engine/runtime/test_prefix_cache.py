"""The prefix cache finds the longest prefix, shares it, and gives up the least recently used first."""

from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.runtime.prefix_cache import LocalPrefixCache


class Log:
    def __init__(self) -> None:
        self.shared: list[tuple[int, int, int]] = []
        self.removed: list[int] = []

    def share(self, source: int, target: int, length: int) -> None:
        self.shared.append((source, target, length))

    def remove(self, sequence: int) -> None:
        self.removed.append(sequence)


def make(cells: int = 100, sequences: int = 8, sharing: str = "parts") -> tuple[LocalPrefixCache, Log]:
    log = Log()
    return LocalPrefixCache(log, cells=cells, sequences=sequences, sharing=sharing), log


def known(cache: LocalPrefixCache, tokens: list[int]) -> int:
    """The length that would be shared, without using it."""
    return cache._find(tokens)[2]


def hold(cache: LocalPrefixCache, tokens: list[int]) -> int:
    branch = cache.open(tokens)
    cache.extend(branch, tokens[branch.length :])
    cache.park(branch)
    return branch.id


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12))
def test_the_longest_known_prefix_is_found(prompts):
    cache, _ = make(cells=1000, sequences=40)
    held: list[list[int]] = []
    for prompt in prompts:
        expected = max((common(prompt, other) for other in held), default=0)
        assert known(cache, prompt) == expected
        branch = cache.open(prompt)
        assert branch.length == expected
        assert branch.tokens() == prompt[:expected]
        cache.extend(branch, prompt[expected:])
        cache.park(branch)
        held.append(prompt)
    distinct = {tuple(prompt[: i + 1]) for prompt in held for i in range(len(prompt))}
    assert cache.free_cells == 1000 - len(distinct), "every prefix is in one cell only"


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_short_common_beginning_is_not_worth_it():
    cache = LocalPrefixCache(Log(), cells=100, sequences=8, shortest=4)
    hold(cache, [1, 2, 3, 4, 5])
    assert cache.open([1, 2, 3, 9]).length == 0
    assert cache.open([1, 2, 3, 4, 9]).length == 4


def test_the_least_recently_used_gives_way_first():
    cache, log = make(cells=30)
    a, b, c = hold(cache, [1] * 10), hold(cache, [2] * 10), hold(cache, [3] * 10)
    cache.drop(cache.open([1] * 10))  # used again
    log.removed.clear()
    assert cache.ensure_free(5)
    assert log.removed == [b]
    assert cache.ensure_free(20)
    assert log.removed == [b, c]
    assert known(cache, [1] * 10) == 10
    assert a not in log.removed


def test_running_branches_are_never_evicted():
    cache, _ = make(cells=20)
    running = cache.open([1] * 15)
    cache.extend(running, [1] * 15)
    hold(cache, [2] * 5)
    assert not cache.ensure_free(6)
    assert known(cache, [1] * 15) == 15
    assert known(cache, [2] * 5) == 0
    assert cache.available_cells() == 5


def test_running_sequences_share_too_and_a_fork_is_a_sequence_of_its_own():
    cache, log = make()
    one = cache.open([])
    cache.extend(one, [1, 2, 3, 4])
    two = cache.open([1, 2, 3, 9])
    assert log.shared == [(one.id, two.id, 3)]
    cache.extend(one, [5])
    cache.extend(two, [9])
    scratch = cache.fork(one, 2)
    assert scratch.tokens() == [1, 2]
    cache.drop(scratch)
    assert (one.tokens(), two.tokens()) == ([1, 2, 3, 4, 5], [1, 2, 3, 9])
    assert cache.free_cells == 100 - 6
    cache.drop(one)
    assert two.tokens() == [1, 2, 3, 9]
    assert cache.free_cells == 100 - 4


def test_the_same_twice_is_kept_once():
    cache, _ = make()
    branches = [cache.open([1, 2, 3]) for _ in range(2)]  # both began before either was computed
    for branch in branches:
        cache.extend(branch, [1, 2, 3])
    for branch in branches:
        cache.park(branch)
    assert cache.free_cells == 97


def test_a_recurrent_state_is_used_whole_or_not_at_all():
    cache, log = make(sharing="whole")
    whole = hold(cache, [1, 2, 3])
    assert known(cache, [1, 2, 9]) == 0
    assert known(cache, [1, 2, 3, 4]) == 3
    branch = cache.open([1, 2, 3, 4])
    assert log.shared == [(whole, branch.id, 3)]


def test_streams_of_their_own_share_nothing():
    cache, log = make(sequences=2, sharing="nothing")
    for _ in range(5):
        hold(cache, [1, 2, 3])
    assert known(cache, [1, 2, 3]) == 0
    assert log.shared == []


def test_more_prompts_than_ids():
    cache, _ = make(cells=1000, sequences=4)
    for i in range(20):
        hold(cache, [i, i, i])
    assert known(cache, [19, 19, 19]) == 3
    assert known(cache, [0, 0, 0]) == 0
