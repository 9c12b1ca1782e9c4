"""Calendar and clock: dates, weekdays and times of day, forwards and sometimes backwards."""

from __future__ import annotations

import random

from .kind import Draft, Kind, Phrasings, worked

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
           "November", "December")  # fmt: skip
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def date(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask for the date between 2 and 49 days before or after a given date, in a year without a leap day."""
    difficulty = rng.randrange(1, 4)
    month, ahead = rng.randrange(12), rng.randrange(2, (15, 30, 50)[difficulty - 1])
    day = rng.randrange(1, _LENGTHS[month] + 1)
    family = phrasings.pick(("after", "from", "before"), ("ago",))
    backwards = family in ("before", "ago")
    here = f"{_MONTHS[month]} {day}"
    prompt = {
        "after": f"Which date is {ahead} days after {here}?",
        "from": f"Today is {here}. What date is it in {ahead} days?",
        "before": f"Which date is {ahead} days before {here}?",
        "ago": f"Today is {here}. What date was it {ahead} days ago?",
    }[family]
    sign = "-" if backwards else "+"
    steps = [f"From {here}, {sign} {ahead} days", f"{day} {sign} {ahead} = {day - ahead if backwards else day + ahead}"]
    day = day - ahead if backwards else day + ahead
    while day > _LENGTHS[month]:
        steps.append(
            f"{_MONTHS[month]} has {_LENGTHS[month]} days: {day} - {_LENGTHS[month]} = {day - _LENGTHS[month]}"
        )
        day -= _LENGTHS[month]
        month = (month + 1) % 12
        steps.append(f"that is in {_MONTHS[month]}")
    while day < 1:
        month = (month - 1) % 12
        steps.append(
            f"{_MONTHS[month]} has {_LENGTHS[month]} days: {day} + {_LENGTHS[month]} = {day + _LENGTHS[month]}"
        )
        day += _LENGTHS[month]
    target = f"{_MONTHS[month]} {day}"
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", target), target)


def weekday(rng: random.Random, phrasings: Phrasings) -> Draft:
    difficulty = rng.randrange(1, 4)
    start, ahead = rng.randrange(7), rng.randrange(2, (7, 20, 80)[difficulty - 1])
    family = phrasings.pick(("in-days", "will-be"), ("days-ago", "yesterday"))
    today = _DAYS[start]
    if family == "yesterday":
        # The answer needs two steps: find today, then count on.
        prompt = f"Yesterday was {today}. What day is it {ahead} days from today?"
        steps = [f"Today is {_DAYS[(start + 1) % 7]}"]
        start = (start + 1) % 7
    else:
        steps = []
        prompt = {
            "in-days": f"Today is {today}. What day is it in {ahead} days?",
            "will-be": f"It is {today}. What weekday will it be {ahead} days from now?",
            "days-ago": f"Today is {today}. What day was it {ahead} days ago?",
        }[family]
    step = -1 if family == "days-ago" else 1
    weeks, rest = divmod(ahead, 7)
    steps.append(f"{ahead} days = {weeks} weeks and {rest} days")
    path = [_DAYS[(start + step * i) % 7] for i in range(rest + 1)]
    steps.append(f"{weeks} * 7 = {weeks * 7}; {ahead} - {weeks * 7} = {rest}")
    steps.append(", ".join(f"{place} {day}" for place, day in enumerate(path)))
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", path[-1]), path[-1])


def clock(rng: random.Random, phrasings: Phrasings) -> Draft:
    """Ask for the time up to 5 hours before or after a given time of the 24-hour clock, also past midnight."""
    difficulty = rng.randrange(1, 4)
    hour, minute = rng.randrange(24), rng.randrange(0, 60, 5 if difficulty == 1 else 1)
    length = rng.randrange(5, (60, 180, 300)[difficulty - 1])
    hours, minutes = divmod(length, 60)
    family = phrasings.pick(("later", "lasts", "earlier"), ("ended",))
    backwards = family in ("earlier", "ended")
    now = f"{hour}:{minute:02d}"
    span = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    prompt = {
        "later": f"It is {now}. What time is it {span} later?",
        "lasts": f"A film starts at {now} and lasts {span}. When does it end?",
        "earlier": f"It is {now}. What time was it {span} earlier?",
        "ended": f"A film ended at {now} and lasted {span}. When did it start?",
    }[family]
    sign = "-" if backwards else "+"
    total_minutes = minute - minutes if backwards else minute + minutes
    total_hours = hour - hours if backwards else hour + hours
    steps = [f"minutes {minute} {sign} {minutes} = {total_minutes}", f"hours {hour} {sign} {hours} = {total_hours}"]
    if not 0 <= total_minutes < 60:
        carry = -1 if backwards else 1
        steps.append(f"minutes {total_minutes} {'+' if backwards else '-'} 60 = {total_minutes - 60 * carry}")
        steps.append(f"hours {total_hours} {sign} 1 = {total_hours + carry}")
        total_minutes, total_hours = total_minutes - 60 * carry, total_hours + carry
    if not 0 <= total_hours < 24:
        steps.append(f"hours {total_hours} {'+' if backwards else '-'} 24 = {total_hours % 24}")
    target = f"{total_hours % 24}:{total_minutes:02d}"
    return Draft(family, difficulty, prompt, worked("; ".join(steps) + ".", target), target)


KINDS = (Kind("date", date), Kind("weekday", weekday), Kind("clock", clock, weight=1.2))
