"""Reasoning over statements in the question: two-step stories, orderings, comparisons."""

from __future__ import annotations

import random
from itertools import pairwise

from .kind import Draft, Kind, Phrasings, worked

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nora", "Omar",
         "Pia", "Quinn", "Rosa", "Sam", "Tess")  # fmt: skip
_THINGS = ("apples", "books", "coins", "stamps", "pens", "shells", "cards", "marbles", "eggs", "tickets")


def story(rng: random.Random, phrasings: Phrasings) -> Draft:
    a, b = rng.sample(NAMES, 2)
    thing = rng.choice(_THINGS)
    difficulty = rng.randrange(1, 4)
    top = (10, 20, 30)[difficulty - 1]
    x, y = rng.randrange(3, top), rng.randrange(2, top)
    k = rng.randrange(2, 6)
    family = phrasings.pick(("boxes", "more-both", "twice"), ("fewer-both", "reversed-more", "shared"))
    match family:
        case "boxes":
            gone = rng.randrange(1, x * k)
            prompt = f"{a} has {k} boxes with {x} {thing} each and gives away {gone}. How many {thing} are left?"
            steps = (
                f"{k} boxes with {x} {thing} are {k} * {x} = {k * x} {thing}; "
                f"{a} keeps {k * x} - {gone} = {k * x - gone}."
            )
            target = k * x - gone
        case "more-both":
            prompt = f"{a} has {x} {thing}. {b} has {y} more than {a}. How many do they have together?"
            steps = (
                f"{a} has {x} {thing}. {b} has {x} + {y} = {x + y} {thing}. "
                f"Together they have {x} + {x + y} = {2 * x + y}."
            )
            target = 2 * x + y
        case "twice":
            prompt = f"{a} has {x} {thing}. {b} has {k} times as many. How many do they have together?"
            steps = (
                f"{a} has {x} {thing}. {b} has {x} * {k} = {x * k} {thing}. "
                f"Together they have {x} + {x * k} = {x + x * k}."
            )
            target = x + x * k
        case "fewer-both":
            x += y
            prompt = f"{a} has {x} {thing}. {b} has {y} fewer than {a}. How many do they have together?"
            steps = (
                f"{a} has {x} {thing}. {b} has {x} - {y} = {x - y} {thing}. "
                f"Together they have {x} + {x - y} = {2 * x - y}."
            )
            target = 2 * x - y
        case "reversed-more":
            # This wording misleads: "more" appears, yet the other person has fewer.
            x += y
            prompt = f"{a} has {x} {thing}, which is {y} more than {b} has. How many do they have together?"
            steps = (
                f"{a} has {x} {thing}. {b} has {x} - {y} = {x - y} {thing}. "
                f"Together they have {x} + {x - y} = {2 * x - y}."
            )
            target = 2 * x - y
        case _:
            total, gone = x * k, rng.randrange(1, x)
            prompt = (
                f"{total} {thing} are shared equally by {k} friends. {a}, one of them, gives {gone} to {b}. "
                f"How many has {a} left?"
            )
            steps = f"Each friend gets {total} / {k} = {x} {thing}. {a} keeps {x} - {gone} = {x - gone} {thing}."
            target = x - gone
    return Draft(family, difficulty, prompt, worked(f"{steps} That makes {target} {thing}.", target), str(target))


_TRAITS = (("taller", "tallest", "shortest", "shorter"), ("older", "oldest", "youngest", "younger"),
           ("faster", "fastest", "slowest", "slower"), ("richer", "richest", "poorest", "poorer"))  # fmt: skip


def ordering(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    more, most, least, less = rng.choice(_TRAITS)
    people = rng.sample(NAMES, difficulty + 3)
    family = phrasings.pick(("most", "least", "mixed"), ("second",))
    facts = [f"{x} is {more} than {y}." for x, y in pairwise(people)]
    if family == "mixed":
        facts = [f"{y} is {less} than {x}." if rng.random() < 0.5 else fact
                 for fact, x, y in zip(facts, people, people[1:], strict=False)]  # fmt: skip
    rng.shuffle(facts)
    if family == "second":
        question, target = f"Who comes second, counting from the {most}?", people[1]
    elif family == "least" or (family == "mixed" and rng.random() < 0.5):
        question, target = f"Who is the {least}?", people[-1]
    else:
        question, target = f"Who is the {most}?", people[0]
    steps = f"From {most} to {least}: {', '.join(people)}."
    return Draft(family, difficulty, f"{' '.join(facts)} {question}", worked(steps, target), target)


def compare(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask to compare decimals of different lengths. This is hard because 9.11, for example, looks larger than 9.9."""
    difficulty = rng.randrange(1, 4)
    whole = rng.randrange(0, 30)
    shown: list[str] = []
    while len(shown) < difficulty + 1:
        base = whole if rng.random() < 0.7 else rng.randrange(0, 30)
        digits = rng.randrange(1, 4)
        fraction = "".join(rng.choices("0123456789", k=digits)).rstrip("0") or str(rng.randrange(1, 10))
        number = f"{base}.{fraction}"
        if number not in shown:
            shown.append(number)
    width = max(len(n.partition(".")[2]) for n in shown)
    padded = [f"{n}{'0' * (width - len(n.partition('.')[2]))}" for n in shown]
    ranked = sorted(shown, key=float)
    family = phrasings.pick(("largest", "bigger"), ("smallest", "not-largest"))
    if family == "not-largest" and len(shown) != 2:
        family = "smallest"
    listed = " or ".join(shown) if len(shown) == 2 else ", ".join(shown)
    prompt, target = {
        "largest": (f"Which is the largest: {listed}?", ranked[-1]),
        "bigger": (f"Of {listed}, name the biggest number.", ranked[-1]),
        "smallest": (f"Which is the smallest: {listed}?", ranked[0]),
        "not-largest": (f"Which of these is not the largest: {listed}?", ranked[0]),
    }[family]
    steps = f"With equal digits: {', '.join(padded)}. In order: {' < '.join(ranked)}."
    return Draft(family, difficulty, prompt, worked(steps, target), target)


KINDS = (Kind("story", story), Kind("ordering", ordering), Kind("compare", compare))
