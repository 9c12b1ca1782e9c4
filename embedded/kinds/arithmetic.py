"""Arithmetic in worked steps: sums, differences, products, chains of operations, and Roman numerals."""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings, worked

_SMALL = 0.1


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 2, 10**digits)


def _small_pair(rng: random.Random) -> tuple[int, int] | None:
    """Return two one-digit numbers in a tenth of the cases, because people try small sums first; else None."""
    return (rng.randrange(1, 10), rng.randrange(1, 10)) if rng.random() < _SMALL else None


def _column_sum(a: int, b: int) -> str:
    """Return the steps of the column addition of `a` and `b`, starting with the ones digits."""
    left, right = str(a)[::-1], str(b)[::-1]
    steps: list[str] = []
    carry = 0
    for place in range(max(len(left), len(right))):
        x = int(left[place]) if place < len(left) else 0
        y = int(right[place]) if place < len(right) else 0
        total = x + y + carry
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        steps.append(f"{terms} = {total}" + (f", carry {carry}" if carry else ""))
    return "; ".join(steps)


def _column_difference(a: int, b: int) -> str:
    """Return the steps of the column subtraction `a - b` for a >= b, starting with the ones digits, with borrows."""
    left, right = str(a)[::-1], str(b)[::-1]
    steps: list[str] = []
    borrow = 0
    for place in range(len(left)):
        x = int(left[place]) - borrow
        y = int(right[place]) if place < len(right) else 0
        borrow = 1 if x < y else 0
        steps.append(f"{x + 10 * borrow} - {y} = {x + 10 * borrow - y}" + (", borrow 1" if borrow else ""))
    return "; ".join(steps)


def add(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 6)
    a, b = _small_pair(rng) or (_number(rng, difficulty + 1), _number(rng, rng.randrange(difficulty, difficulty + 2)))
    family = phrasings.pick(("plus", "sum", "how-much"), ("total", "more-than"))
    prompt = {
        "plus": f"What is {a} + {b}?",
        "sum": f"Find the sum of {a} and {b}.",
        "how-much": f"How much is {a} plus {b}?",
        "total": f"Put {a} and {b} together. What is the total?",
        "more-than": f"Which number is {a} more than {b}?",
    }[family]
    return Draft(family, difficulty, prompt, worked(f"{_column_sum(a, b)}.", a + b), str(a + b))


def subtract(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    a, b = _small_pair(rng) or (_number(rng, difficulty + 2), _number(rng, rng.randrange(difficulty, difficulty + 3)))
    if a < b:
        a, b = b, a
    family = phrasings.pick(("minus", "take-away", "difference"), ("from", "less-than"))
    prompt = {
        "minus": f"What is {a} - {b}?",
        "take-away": f"Take {a} and subtract {b}.",
        "difference": f"How much is {a} minus {b}?",
        "from": f"Subtract {b} from {a}.",
        "less-than": f"Which number is {b} less than {a}?",
    }[family]
    return Draft(family, difficulty, prompt, worked(f"{_column_difference(a, b)}.", a - b), str(a - b))


def multiply(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    digits = ((2, 1), (3, 1), (2, 2))[difficulty - 1]
    a, b = _small_pair(rng) or (_number(rng, digits[0]), _number(rng, digits[1]))
    family = phrasings.pick(("times", "multiply", "product"), ("lots-of", "groups"))
    prompt = {
        "times": f"What is {a} * {b}?",
        "multiply": f"Multiply {a} by {b}.",
        "product": f"Work out the product of {a} and {b}.",
        "lots-of": f"How many is {b} lots of {a}?",
        "groups": f"There are {b} groups of {a}. How many in all?",
    }[family]
    steps: list[str] = []
    for part in _places(b):
        figures = _places(a)
        steps += [f"{figure} * {part} = {figure * part}" for figure in figures]
        if len(figures) > 1:
            steps.append(" + ".join(str(figure * part) for figure in figures) + f" = {a * part}")
    if len(_places(b)) > 1:
        steps.append(" + ".join(str(a * part) for part in _places(b)) + f" = {a * b}")
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", a * b), str(a * b))


def _places(number: int) -> list[int]:
    """Split a number into the values of its digits: 405 gives [400, 5]."""
    digits = str(number)
    return [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]


def chain(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 5)
    family = phrasings.pick(("start-with", "think-of"), ("backwards",))
    value = start = rng.randrange(2, 40)
    words: list[str] = []
    steps: list[str] = []
    for _ in range(difficulty + 2):
        word, new, shown = _operation(rng, value)
        words.append(word)
        steps.append(f"{shown} = {new}")
        value = new
    if family == "backwards":
        # The starting number comes last, so the model must hold the operations before it can apply them.
        prompt = f"{', then '.join(words)}: do this to {start}. What comes out?"
        prompt = prompt[0].upper() + prompt[1:]
    elif family == "start-with":
        prompt = f"Start with {start}. " + " ".join(f"{w[0].upper()}{w[1:]}." for w in words) + " What is the result?"
    else:
        prompt = f"I think of {start}, {', '.join(words)}. Where do I end up?"
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", value), str(value))


def _operation(rng: random.Random, value: int) -> tuple[str, int, str]:
    """Return a random operation whose result is between 0 and 200: its words, its result and its working."""
    choices = ["add"] if value < 170 else []
    if value > 3:
        choices += ["subtract"]
    if value < 80:
        choices += ["double"]
    if value < 50:
        choices += ["times"]
    if value % 2 == 0 and value > 3:
        choices += ["halve"]
    match rng.choice(choices):
        case "add":
            n = rng.randrange(2, 30)
            return f"add {n}", value + n, f"{value} + {n}"
        case "subtract":
            n = rng.randrange(1, min(value, 30))
            return f"subtract {n}", value - n, f"{value} - {n}"
        case "double":
            return "double it", value * 2, f"{value} * 2"
        case "times":
            n = rng.randrange(3, 5)
            return f"multiply by {n}", value * n, f"{value} * {n}"
        case _:
            return "halve it", value // 2, f"{value} / 2"


_ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def _roman_parts(value: int) -> list[tuple[int, str]]:
    parts: list[tuple[int, str]] = []
    for number, letters in _ROMAN:
        while value >= number:
            parts.append((number, letters))
            value -= number
    return parts


def roman(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    value = rng.randrange(3, (50, 400, 3000)[difficulty - 1])
    parts = _roman_parts(value)
    letters = "".join(p[1] for p in parts)
    family = phrasings.pick(("to-number", "to-roman"), ("year",))
    if family == "to-roman":
        rest, steps = value, []
        for number, sign in parts:
            rest -= number
            steps.append(f"{sign} leaves {rest}")
        prompt = f"Write {value} in Roman numerals."
        return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", letters), letters)
    prompt = (
        f"What number is {letters}?" if family == "to-number" else f"A stone is marked {letters}. Read it as a number."
    )
    total = 0
    steps = []
    for number, sign in parts:
        total += number
        steps.append(f"{sign} makes {total}")
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", value), str(value))


KINDS = (
    Kind("add", add),
    Kind("subtract", subtract, weight=1.2),
    Kind("multiply", multiply),
    Kind("chain", chain),
    Kind("roman", roman),
)
