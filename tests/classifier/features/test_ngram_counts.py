"""Counts of a text equal those of a slow reference that reads character by character."""

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from updraft.classifier.features.ngram_counts import COUNTS, TextCounts, count_text, hash_of

CUES = sorted(("the", "what", "if", "a"), key=hash_of)
CUE_HASHES = np.array([hash_of(cue) for cue in CUES], np.uint32)
WORDS = st.sampled_from(
    ["the", "what", "if", "a", "thé", "12", "007", "unquestionably", "\n", " ", ".", "٣", "字", "\ud800"]
)
MASK = 0xFFFFFFFF


def kind_of(character: str) -> int:
    """0 nothing that counts, 1 part of a word, 2 a digit; all beyond ASCII is part of words."""
    if ord(character) >= 128:
        return 1
    return 2 if character.isdigit() else int(character.isalpha())


def tokens_of(text: str) -> list[tuple[int, str]]:
    """Words and numbers in order, with their kind."""
    tokens: list[tuple[int, str]] = []
    before = -1
    for character in text:
        kind = kind_of(character)
        if kind == before:
            tokens[-1] = (kind, tokens[-1][1] + character)
        else:
            tokens.append((kind, character))
        before = kind
    return [token for token in tokens if token[0]]


def token_hash(token: str) -> int:
    """The polynomial hash, whose powers repeat after 64 characters; digits read 0."""
    powers = [1]
    for _ in range(63):
        powers.append(powers[-1] * 0x01000193 & MASK)
    powers = [power * 0x01000193 & MASK for power in powers]
    codes = [ord("0") if kind_of(character) == 2 else ord(character) for character in token]
    return sum((code + 1) * powers[at % 64] for at, code in enumerate(codes)) & MASK


def bucket(value: int) -> int:
    """MurmurHash3's finaliser, then the low bits."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & MASK
    value ^= value >> 13
    value = value * 0xC2B2AE35 & MASK
    value ^= value >> 16
    return value & (COUNTS // 2 - 1)


def expected_ngrams(text: str) -> np.ndarray:
    counted = np.zeros(COUNTS, np.int64)
    hashes = [token_hash(token) for _, token in tokens_of(text)]
    pairs = [(one * 0x9E3779B1 + other) & MASK for one, other in itertools.pairwise(hashes)]
    for value in hashes + pairs:
        counted[bucket(value)] += 1
    codes = [32, *(ord("0") if kind_of(c) == 2 else ord(c) for c in text), 32]
    for at in range(len(codes) - 3):
        rolling = codes[at]
        for code in codes[at + 1 : at + 4]:
            rolling = (rolling * 0x01000193 + code) & MASK
        counted[COUNTS // 2 + bucket(rolling ^ (4 * 0x2545F491 & MASK))] += 1
    damped = np.concatenate(([0.0], 1.0 + np.log(np.arange(1, 1024)))).astype(np.float32)
    return damped[np.minimum(counted, 1023)]


@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=200).map("".join)))
@example("")
@example("a")
@example("ab")
@example("the " * 3000)  # more often than anything counts
@example("x" * 300 + "1" * 300)  # longer than there are powers
def test_counts_equal_a_slow_reference(text: str) -> None:
    counts = count_text(text, CUE_HASHES)
    tokens = tokens_of(text)
    words, numbers = ([token for kind, token in tokens if kind == wanted] for wanted in (1, 2))
    assert np.array_equal(counts.ngrams, expected_ngrams(text))
    assert counts.ngrams.dtype == np.float32
    assert counts.characters.tolist() == [*(text.count(chr(c)) for c in range(128)), sum(ord(c) > 127 for c in text)]
    assert counts.cues.tolist() == [words.count(cue) for cue in CUES]
    assert (counts.words, counts.word_letters) == (len(words), sum(map(len, words)))
    assert counts.longest_word == max(map(len, words), default=0)
    assert counts.long_words == sum(len(word) > 8 for word in words)
    assert counts.distinct_words == len(set(words))
    assert (counts.numbers, counts.digits) == (len(numbers), sum(map(len, numbers)))
    assert counts.longest_number == max(map(len, numbers), default=0)


def test_counted_ngrams() -> None:
    counts: TextCounts = count_text("what if the 12 if, 7?", CUE_HASHES)
    assert (counts.words, counts.word_letters, counts.longest_word, counts.distinct_words) == (4, 11, 4, 3)
    assert (counts.numbers, counts.digits, counts.longest_number) == (2, 3, 2)
    assert dict(zip(CUES, counts.cues.tolist(), strict=True)) == {"what": 1, "if": 2, "the": 1, "a": 0}
    # Six tokens of which "if" is there twice, and its five pairs; 21 characters and a blank at either end.
    half = COUNTS // 2
    grams = [np.expm1(part[part > 0] - 1.0) + 1.0 for part in (counts.ngrams[:half], counts.ngrams[half:])]
    assert [round(float(part.sum())) for part in grams] == [11, 20]
