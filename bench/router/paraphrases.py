"""Paraphrased questions, to test whether a router decides by content or by wording.

A paragraph of `paraphrases.txt` has several wordings of a question, one per line, in which @ is a placeholder. Its last
line lists words for the placeholder. A pair is two wordings with the same word.
"""

from __future__ import annotations

import random
from pathlib import Path


def paraphrases(per_intent: int = 10, seed: int = 0) -> list[tuple[str, str]]:
    """Return about a hundred pairs: up to `per_intent` of each paragraph, without repeats. Deterministic for a seed."""
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    for intent in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n"):
        *forms, last = intent.strip().splitlines()
        things = last.split("; ")
        for thing in rng.sample(things, min(per_intent, len(things))):
            one, other = rng.sample(forms, 2)
            pairs.append((one.replace("@", thing), other.replace("@", thing)))
    return pairs
