"""A cache of what was made of texts: bounded in entries and in bytes, the least recently used go first."""

from __future__ import annotations

from updraft.classifier.policy.answer_reader import TextCache


def test_the_least_recently_used_goes_first() -> None:
    made: list[str] = []
    cache: TextCache[str] = TextCache(most=2)

    def make(text: str) -> str:
        made.append(text)
        return text.upper()

    assert [cache.find(text, make) for text in ("a", "b", "a", "c", "a", "b")] == ["A", "B", "A", "C", "A", "B"]
    assert made == ["a", "b", "c", "b"]
    assert len(cache) == 2


def test_long_texts_push_others_out_and_too_long_ones_are_not_kept() -> None:
    cache: TextCache[int] = TextCache(most=64, max_bytes=2**20)
    for letter in "abcdefgh":
        cache.put(letter * 30_000, 1)  # about 300 kB each with what is made of it
    assert len(cache) == 3
    cache.put("x" * 10**6, 1)
    assert cache.get("x" * 10**6) is None
    cache.put("y", 1)
    cache.drop("y")
    cache.put("z", 1)
    assert (cache.get("y"), cache.get("z")) == (None, 1)
