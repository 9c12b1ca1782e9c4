"""Questions asked in several ways, to see whether a router decides by what is asked or by how it is put.

Every intent in `paraphrases.txt` has a few forms, one a line with @ for the thing, and at the end a line of things.
A pair is the same thing in two of the forms.
"""

from __future__ import annotations

import random
from pathlib import Path


def paraphrases(per_intent: int = 10, seed: int = 0) -> list[tuple[str, str]]:
    """Some hundred pairs: up to `per_intent` of each intent, no question twice. The same seed gives the same pairs."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    for intent in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n"):
        *forms, last = intent.strip().splitlines()
        things = last.split("; ")
        for thing in rng.sample(things, min(per_intent, len(things))):
            one, other = rng.sample(forms, 2)
            found.append((one.replace("@", thing), other.replace("@", thing)))
    return found
