"""Letters and lists: reversing, counting letters, sorting."""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings, worked

WORDS = (
    "apple", "anchor", "autumn", "balloon", "banana", "basket", "blanket", "bottle", "bridge", "butter", "button",
    "cabbage", "camera", "candle", "carpet", "castle", "cherry", "circle", "coffee", "cotton", "cousin", "dinner",
    "doctor", "dolphin", "engine", "evening", "feather", "finger", "flower", "forest", "garden", "ginger", "glacier",
    "guitar", "hammer", "harbor", "honey", "island", "jacket", "journey", "jungle", "kettle", "kitchen", "ladder",
    "lantern", "lemon", "letter", "library", "magnet", "marble", "meadow", "melon", "mirror", "monkey", "mountain",
    "needle", "number", "ocean", "orange", "oyster", "paper", "parrot", "pebble", "pencil", "pepper", "picture",
    "pillow", "planet", "pocket", "potato", "puzzle", "rabbit", "raspberry", "ribbon", "river", "rocket", "saddle",
    "sailor", "school", "secret", "shadow", "silver", "spider", "spring", "square", "station", "strawberry", "summer",
    "sunset", "syllable", "teapot", "thunder", "ticket", "tomato", "tunnel", "turtle", "umbrella", "valley", "velvet",
    "village", "violin", "walnut", "whistle", "window", "winter", "wizard", "yellow", "zipper",
)  # fmt: skip


def reverse(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask for letters in reverse order. A rare wording also drops the first letter, as a trap for confident models."""
    difficulty = rng.randrange(1, 5)
    letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=2 * difficulty + 3)
    family = phrasings.pick(("reverse", "backwards"), ("right-to-left", "without-first"))
    shown = " ".join(letters)
    prompt = {
        "reverse": f"Reverse the letters {shown}.",
        "backwards": f"Write {shown} backwards.",
        "right-to-left": f"Read {shown} from right to left. What do you get?",
        "without-first": f"Drop the first letter of {shown} and reverse the rest.",
    }[family]
    kept = letters[1:] if family == "without-first" else letters
    back = " ".join(reversed(kept))
    steps = "; ".join(f"{place} {letter}" for place, letter in enumerate(kept, 1))
    return Draft(family, difficulty, prompt, worked(f"{steps}.", back), back)


def count(rng: random.Random, phrasings: Phrasings) -> Draft:
    word = rng.choice(WORDS)
    difficulty = 1 + (len(word) > 5) + (len(word) > 7)
    letter = rng.choice(word)
    family = phrasings.pick(("how-many", "count"), ("vowels", "not-letter"))
    match family:
        case "how-many":
            prompt, counted = f"How many times does {letter} appear in {word}?", letter
        case "count":
            prompt, counted = f"Count the letter {letter} in {word}.", letter
        case "vowels":
            prompt, counted = f"How many vowels are in {word}?", "aeiou"
        case _:
            prompt = f"How many letters of {word} are not {letter}?"
            counted = "".join(sorted(set(word) - {letter}))
    steps: list[str] = []
    total = 0
    for place, sign in enumerate(word, 1):
        total += sign in counted
        steps.append(f"{place} {sign}: {total}")
    return Draft(family, difficulty, prompt, worked(f"{'; '.join(steps)}.", total), str(total))


def sort(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    numbers = rng.sample(range(1, 200 if difficulty > 2 else 100), difficulty + 2)
    family = phrasings.pick(("ascending", "order", "descending"), ("largest-first",))
    way = {
        "ascending": "from smallest to largest",
        "order": "in order",
        "descending": "from largest to smallest",
        "largest-first": "in a row, the largest first",
    }[family]
    ranked = sorted(numbers, reverse=family in ("descending", "largest-first"))
    target = ", ".join(str(n) for n in ranked)
    prompt = f"Put these {way}: {', '.join(str(n) for n in numbers)}."
    return Draft(family, difficulty, prompt, target, target)


KINDS = (Kind("reverse", reverse), Kind("count", count), Kind("sort", sort, grade="exact"))
