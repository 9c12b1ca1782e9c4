"""Everyday data work: unit conversion, JSON extraction from a sentence, prices in a list."""

from __future__ import annotations

import json
import random

from .kind import Draft, Kind, Phrasings, worked
from .logic import NAMES

# Rows of a large unit, a small unit, and the number of small units in a large unit.
_UNITS = (("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("kg", "g", 1000), ("t", "kg", 1000),
          ("l", "ml", 1000), ("h", "min", 60), ("min", "s", 60), ("days", "h", 24), ("weeks", "days", 7),
          ("dozen", "pieces", 12), ("feet", "inches", 12), ("yards", "feet", 3), ("pounds", "ounces", 16))  # fmt: skip
_WHOLE = 0.2  # share of amounts without a remainder, because people try such amounts first
_SINGULAR = {"days": "day", "weeks": "week", "feet": "foot", "yards": "yard", "pounds": "pound"}


def units(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    large, small, factor = rng.choice(_UNITS)
    whole, part = rng.randrange(2, (6, 10, 15)[difficulty - 1]), rng.randrange(1, factor)
    family = phrasings.pick(("to-small", "express", "with-rest"), ("to-large",))
    one = _SINGULAR.get(large, large)
    exact = whole * factor
    if family == "to-large":
        prompt = f"How many {large} are {exact} {small}?"
        steps = f"{factor} {small} make 1 {one}; {exact} / {factor} = {whole}."
        return Draft(family, difficulty, prompt, worked(steps, f"{whole} {large}"), f"{whole} {large}")
    if family != "with-rest" and rng.random() < _WHOLE:
        whole = whole if rng.random() < 0.8 else 1
        exact = whole * factor
        prompt = (
            f"How many {small} are {whole} {large}?" if family == "to-small" else f"Express {whole} {large} in {small}."
        )
        steps = f"1 {one} is {factor} {small}; {whole} {large} are {whole} * {factor} = {exact}."
        return Draft(family, difficulty, prompt, worked(steps, f"{exact} {small}"), f"{exact} {small}")
    total = exact + part
    if family == "with-rest":
        prompt = f"Split {total} {small} into {large} and {small}."
        steps = f"{factor} {small} make 1 {one}; {whole} * {factor} = {exact}; {total} - {exact} = {part}."
        target = f"{whole} {large} {part} {small}"
        return Draft(family, difficulty, prompt, worked(steps, target), target)
    given = f"{whole} {large} {part} {small}"
    prompt = f"How many {small} are {given}?" if family == "to-small" else f"Express {given} in {small}."
    steps = (
        f"1 {one} is {factor} {small}; {whole} {large} are {whole} * {factor} = {exact}; {exact} + {part} = {total}."
    )
    return Draft(family, difficulty, prompt, worked(steps, f"{total} {small}"), f"{total} {small}")


_CITIES = ("Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Rome", "Delhi", "Perth", "Quito", "Kyiv", "Accra", "Hanoi")
_JOBS = ("baker", "pilot", "nurse", "painter", "farmer", "teacher", "welder", "lawyer", "singer", "sailor")


def extract_json(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    fields: dict[str, str | int] = {"name": rng.choice(NAMES), "age": rng.randrange(18, 90),
                                    "city": rng.choice(_CITIES), "job": rng.choice(_JOBS)}  # fmt: skip
    wanted = ["name", "age", "city", "job"][: difficulty + 1]
    family = phrasings.pick(("sentence", "list"), ("buried", "key-order"))
    name, age, city, job = fields["name"], fields["age"], fields["city"], fields["job"]
    text = {
        "sentence": f"{name} is a {age} year old {job} from {city}.",
        "list": f"Name: {name}. City: {city}. Job: {job}. Age: {age}.",
        "buried": f"In {city} we met the {job}, {name}, who had just turned {age}.",
        "key-order": f"{name}, {job}, {city}, {age}.",
    }[family]
    if family == "key-order":
        rng.shuffle(wanted)
    target = json.dumps({key: fields[key] for key in wanted})
    return Draft(family, difficulty, f"{text} Give {', '.join(wanted)} as JSON.", target, target)


def table(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask for a total, the change or a difference. The answer needs two steps: look up prices, then calculate."""
    difficulty = rng.randrange(1, 4)
    goods = rng.sample(("bread", "milk", "rice", "tea", "soap", "salt", "oil", "jam", "corn", "fish"), difficulty + 2)
    prices = {item: rng.randrange(2, 20) for item in goods}
    family = phrasings.pick(("several", "two-items"), ("change", "dearest"))
    listed = ", ".join(f"{item} {price}" for item, price in prices.items())
    first, second = rng.sample(goods, 2)
    k = rng.randrange(2, 6)
    match family:
        case "several":
            total = prices[first] * k
            question = f"What do {k} {first} cost?"
            steps = f"One {first} costs {prices[first]}; {k} {first} cost {k} * {prices[first]} = {total}."
        case "two-items":
            a, b = prices[first] * k, prices[second]
            total = a + b
            question = f"What do {k} {first} and one {second} cost?"
            steps = (
                f"One {first} costs {prices[first]}; {k} {first} cost {k} * {prices[first]} = {a}; "
                f"one {second} costs {b}; together {a} + {b} = {total}."
            )
        case "change":
            cost = prices[first] + prices[second]
            total = 100 - cost
            question = f"I buy {first} and {second} and pay with 100. What change do I get?"
            steps = (
                f"{first} costs {prices[first]}; {second} costs {prices[second]}; "
                f"{prices[first]} + {prices[second]} = {cost}; 100 - {cost} = {total}."
            )
        case _:
            top, low = max(prices.values()), min(prices.values())
            total = top - low
            question = "How much dearer is the dearest than the cheapest?"
            steps = f"the dearest costs {top}, the cheapest {low}; {top} - {low} = {total}."
    return Draft(
        family, difficulty, f"Prices: {listed}. {question}", worked(steps[0].upper() + steps[1:], total), str(total)
    )


KINDS = (Kind("units", units), Kind("json", extract_json, grade="json"), Kind("table", table, weight=1.3))
