"""The n-gram index says what a search of the whole text would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.types.draft_record import NgramIndex


def searched(tokens: list[int]) -> int | None:
    """Behind the last earlier occurrence of the text's last three tokens."""
    ends = [end for end in range(3, len(tokens)) if tokens[end - 3 : end] == tokens[-3:]]
    return ends[-1] if ends else None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.lists(st.integers(1, 9), max_size=20))
def test_ngram_index_matches_a_search(text: list[int], jumps: list[int]) -> None:
    index, end = NgramIndex(), 1
    for jump in [*jumps, len(text)]:
        assert index.find(text[:end]) == searched(text[:end])
        assert index.find(text[:end]) == searched(text[:end]), "asking changes nothing"
        end = min(len(text), end + jump)


def test_every_token_is_read_once() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    text = Counted(range(1000))
    index = NgramIndex()
    index.find(text)
    before = text.reads
    for token in range(100):
        text.append(token)
        index.find(text)
    assert text.reads - before == 2 * 100
