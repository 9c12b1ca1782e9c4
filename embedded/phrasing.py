"""Rephrasing of generated questions as people type them: other words, cases and spaces. Answers do not change.

A question is first rephrased in words, if rules match, and then gets typical keyboard variations. A word rule lists
texts that may replace another text, so that a new kind of question needs only a line here and no code.
"""

from __future__ import annotations

import random
import re

REPHRASED = 0.6  # share of questions that are rephrased
_WORDED, _SPACED, _CASED, _SPELT = 0.8, 0.3, 0.45, 0.2

_EXPRESSION = (
    "{e}", "{e}", "{e}?", "{e} =", "{e}=", "{e} = ?", "{e}=?", "What is {e}?", "What is {e}?", "What's {e}?",
    "whats {e}", "What does {e} equal?", "What does {e} make?", "What do you get for {e}?", "How much is {e}?",
    "Calculate {e}.", "Compute {e}.", "Work out {e}.", "Solve {e}.", "Evaluate {e}.", "Find {e}.", "Tell me {e}.",
    "Can you work out {e}?", "Could you calculate {e} for me?", "I need the answer to {e}.", "What would {e} be?",
    "Do you know what {e} is?", "Please tell me what {e} is.", "Give me the result of {e}.", "{e} equals what?",
    "{e} is what?", "{e} makes?", "Answer this: {e}", "Q: {e}",
)  # fmt: skip
_SUMS = ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a}+{b}", "{a} +{b}", "{a} plus {b}", "{a} plus {b}",
         "{a} and {b} added up", "the sum of {a} and {b}", "{a} added to {b}", "{a} and {b} together")  # fmt: skip
_DIFFERENCES = ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a}-{b}", "{a} -{b}", "{a} minus {b}", "{a} minus {b}",
                "{a} take away {b}", "{a} less {b}", "{a} \u2212 {b}", "{a} \u2013 {b}",
                "the difference between {a} and {b}")  # fmt: skip
_PRODUCTS = ("{a} * {b}", "{a}*{b}", "{a} x {b}", "{a}x{b}", "{a} \u00d7 {b}", "{a}\u00d7{b}", "{a} X {b}",
             "{a} times {b}", "{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}")  # fmt: skip
# Rows of a pattern for plain questions, and the expressions and sentences that ask the same about the two numbers.
_CALCULATIONS = (
    (re.compile(r"(?:What is|Find the sum of|How much is) (\d+) (?:\+|and|plus) (\d+)[?.]"), _SUMS,
     ("Add {a} and {b}.", "Add {a} to {b}.", "Sum {a} and {b}.", "If I add {a} and {b}, what do I get?",
      "Add up {a} and {b}.", "How much do {a} and {b} make?")),
    (re.compile(r"(?:What is|Take|How much is) (\d+) (?:-|and subtract|minus) (\d+)[?.]"), _DIFFERENCES,
     ("Subtract {b} from {a}.", "Take {b} away from {a}.", "What is left if I take {b} from {a}?",
      "How much is left of {a} without {b}?", "Take {b} from {a}.")),
    (re.compile(r"(?:What is|Multiply|Work out the product of) (\d+) (?:\*|by|and) (\d+)[?.]"), _PRODUCTS,
     ("Multiply {a} by {b}.", "Multiply {a} and {b}.", "Multiply {a} with {b}.", "What do {b} times {a} make?")),
)  # fmt: skip

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
            "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_UNIT = re.compile(r"\b(km|m|cm|mm|kg|g|t|l|ml|h|min|s)\b")
_UNIT_NAMES = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms", "g": "grams",
    "t": "tons", "l": "liters", "ml": "milliliters", "h": "hours", "min": "minutes", "s": "seconds",
}  # fmt: skip
_NAMED = 0.35

# A regular expression for a part of a question, and its possible replacements, which refer to groups by number.
_RULES = tuple((re.compile(rf"(?<!\w)(?:{old})"), tuple(new)) for old, new in (
    # chains of operations
    (r"Start with (?=\d)", ("Begin with ", "Take ", "Start at ", "Starting with ", "Start from ")),
    (r"I think of (?=\d)", ("I start with ", "Think of ", "I take ", "My number is ")),
    (r"What is the result\?",
     ("What do you get?", "What's the result?", "Result?", "What is the answer?", "What number do I have?",
      "What comes out?", "What do I end up with?")),
    (r"Where do I end up\?", ("What do I get?", "What is my number now?", "What is the result?")),
    (r"multiply by (?=\d)", ("times ", "multiply it by ", "multiply that by ")),
    (r"subtract (?=\d+[,.:])", ("take away ", "minus ", "subtract ")),
    ("double it", ("double that", "double", "times two")),
    ("halve it", ("halve that", "halve", "take half")),
    # Roman numerals
    (r"What number is ([MDCLXVI]+)\?",
     ("What is {0}?", "{0} as a number", "{0} in numbers?", "Convert {0} to a number.",
      "What does the Roman numeral {0} mean?", "Roman numeral {0}", "What is {0} in digits?", "Read {0}.",
      "Which number is {0}?", "Roman number {0} in decimal", "Translate the Roman numeral {0}.")),
    (r"Write (\d+) in Roman numerals\.",
     ("{0} in Roman numerals", "What is {0} in Roman numerals?", "Convert {0} to Roman numerals.",
      "{0} as a Roman numeral", "How do you write {0} in Roman numerals?", "{0} to Roman",
      "Give me {0} in Roman numerals.", "Roman numeral for {0}", "{0} in Roman")),
    # stories
    (r"How many do they have together\?",
     ("How many do they have in total?", "How many do both have?", "How many are there altogether?",
      "How many have they together?", "What do they have in all?")),
    (r"How many (\w+) are left\?", ("How many {0} remain?", "How many are left?", "How many {0} are still there?")),
    ("gives away", ("gives out", "loses", "sells")),
    # orderings and comparisons
    (r"Who is the (?=\w+\?)",
     ("Who's the ", "Which one is the ", "Tell me who is the ", "Which of them is the ", "Now who is the ",
      "So who is the ")),
    ("Which is the largest:",
     ("Which is larger:", "Which is bigger:", "Which number is bigger:", "What is the largest:",
      "Which one is greater:", "Which is the biggest:", "Which number is the largest:", "What's bigger,",
      "Find the largest:", "Largest of")),
    (r"Of (\d[^?]*), name the biggest number\.",
     ("What is the biggest number of {0}?", "Name the biggest of {0}.", "Biggest of {0}?",
      "Out of {0}, which is the biggest?", "Tell me the largest of {0}.")),
    # letters and lists
    (r"Reverse the letters ([a-z ]+)\.",
     ("Reverse {0}.", "Reverse these letters: {0}", "Spell {0} backwards.", "{0} reversed",
      "What is {0} in reverse?", "Turn the letters {0} around.", "Reverse this: {0}")),
    (r"Write ([a-z ]+) backwards\.",
     ("{0} backwards", "What is {0} backwards?", "Say {0} backwards.", "Write the letters {0} backwards.",
      "Type {0} backwards.")),
    (r"How many times does (\w) appear in (\w+)\?|Count the letter (\w) in (\w+)\.",
     ("How many {0}'s are in {1}?", "How many {0} are in {1}?", "How often does {0} appear in {1}?",
      "How many times is {0} in {1}?", "How many letters {0} are in {1}?", "How many {0}s are there in {1}?",
      "How often is the letter {0} in {1}?", "Count {0} in {1}.", "Count the {0}s in {1}.",
      "How many times does the letter {0} occur in {1}?", "Number of {0} in {1}",
      'How many times does "{0}" appear in "{1}"?', "In {1}, how many {0} are there?",
      "How many times does the letter {0} appear in the word {1}?")),
    (r"Put these in order: (\d[\d, ]*)\.",
     ("Sort {0}.", "Sort {0}", "Sort these: {0}", "Put {0} in order.", "Sort the numbers {0}.", "{0} in order",
      "Order {0}", "Arrange {0}", "Put in order: {0}", "Sort: {0}")),
    ("Put these (?=in order|from)",
     ("Sort these ", "Arrange these ", "Order these ", "Put these numbers ", "Sort ", "Sort these numbers ",
      "List these ", "Put the following numbers ")),
    ("from smallest to largest:",
     ("in ascending order:", "from low to high:", "from lowest to highest:", "from least to greatest:",
      "smallest first:", "ascending:")),
    ("from largest to smallest:",
     ("in descending order:", "from high to low:", "from highest to lowest:", "from greatest to least:",
      "biggest first:", "descending:")),
    # dates and weekdays
    (r"Which date is (\d+) days (after|before) (\w+ \d+)\?",
     ("What date is {0} days {1} {2}?", "What's the date {0} days {1} {2}?", "{0} days {1} {2}",
      "What date comes {0} days {1} {2}?", "Date {0} days {1} {2}?", "What day of the year is {0} days {1} {2}?",
      "Find the date {0} days {1} {2}.", "Give me the date {0} days {1} {2}.")),
    (r"What date is it in (\d+) days\?",
     ("What's the date in {0} days?", "What will the date be in {0} days?", "What date will it be in {0} days?",
      "Which date is it {0} days from now?", "What date is {0} days later?")),
    (r"What day is it in (\d+) days\?",
     ("What day will it be in {0} days?", "Which day is it in {0} days?", "What weekday is it in {0} days?",
      "What day of the week is it {0} days from now?", "Which day is {0} days later?")),
    (r"It is (\w+day)\. What weekday will it be (\d+) days from now\?",
     ("What day is {1} days after {0}?", "Which weekday is {1} days after {0}?", "{1} days after {0}",
      "{0} plus {1} days", "What day comes {1} days after {0}?", "If it is {0}, what day is it in {1} days?")),
    (r"Today is ([^.?]+)\. What",
     ("If today is {0}, what", "Today's {0}. What", "It's {0}. What", "It is {0} today. What",
      "Suppose today is {0}. What", "Say it is {0}. What", "Today is {0}, what")),
    (rf"({_MONTH}) (\d+)(?!\d)", ("{1} {0}", "{0} {1}", "{0} {1}")),
    (rf"({_MONTH}) (1[1-3]|\d?[04-9])(?!\d)", ("{0} {1}th", "{0} {1}", "{0} {1}", "the {1}th of {0}")),
    # the clock
    (r"(\d+) h (\d+) min",
     ("{0} hours {1} minutes", "{0} hours and {1} minutes", "{0}h {1}m", "{0} h {1} min", "{0} h {1} min",
      "{0} h and {1} min")),
    (r"(\d+) min(?!\w)", ("{0} minutes", "{0} min", "{0} min", "{0} mins")),
    (r"It is (\d+:\d+)\. What time is it (.*) later\?",
     ("What time is {1} after {0}?", "What time is it {1} after {0}?", "{0} plus {1}", "{1} after {0}",
      "It's {0} now. What time will it be in {1}?", "If it is {0}, what time is it in {1}?")),
    (r"It is (\d+:\d+)\. What time was it (.*) earlier\?",
     ("What time is {1} before {0}?", "What time was it {1} before {0}?", "{0} minus {1}", "{1} before {0}",
      "It's {0} now. What time was it {1} ago?")),
    ("A film starts", ("A movie starts", "The film starts", "A show starts", "A lesson starts", "My film begins")),
    (r"When does it end\?",
     ("When is it over?", "What time does it end?", "When will it end?", "At what time does it end?")),
    # units
    (r"How many (\w+) are ((?:\d+ \w+ ?)+)\?|Express ((?:\d+ \w+ ?)+) in (\w+)\.", ("units",)),
    (r"Split (\d+ \w+) into (\w+) and (\w+)\.",
     ("How many {1} and {2} are {0}?", "Convert {0} to {1} and {2}.", "{0} in {1} and {2}",
      "What is {0} in {1} and {2}?", "Express {0} in {1} and {2}.", "Write {0} as {1} and {2}.")),
    # JSON and prices
    (r"Give ([a-z, ]+) as JSON\.",
     ("Return {0} as JSON.", "Extract {0} as JSON.", "Give me {0} as JSON.", "{0} as JSON", "Put {0} into JSON.",
      "Make JSON with {0}.", "Write {0} as JSON.", "Output JSON with {0}.", "JSON with {0} please.")),
    (r"What do (\d+ \w+(?: and one \w+)?) cost\?",
     ("How much do {0} cost?", "How much is {0}?", "What is the price of {0}?", "What do I pay for {0}?",
      "How much are {0}?", "What would {0} cost?")),
    ("Prices:", ("The prices are:", "Price list:", "A shop sells:", "Here are the prices:")),
    # facts
    (r"(?:What|Which city) is the capital of ([^?]+)\?|Name the capital of ([^.]+)\.",
     ("capital of {0}", "capital of {0}", "Capital of {0}?", "What's the capital of {0}?", "What is {0}'s capital?",
      "{0}'s capital", "What is the capital city of {0}?", "Tell me the capital of {0}.",
      "Do you know the capital of {0}?", "{0} capital", "What city is the capital of {0}?", "The capital of {0} is",
      "What is the name of the capital of {0}?", "Which city is {0}'s capital?",
      "Can you tell me the capital of {0}?", "Give me the capital of {0}.", "{0}: what is the capital?")),
    (r"(?:Which country has the capital|Of which country is) ([^?]+?)(?: the capital)?\?",
     ("{0} is the capital of what?", "Which country's capital is {0}?", "What country has {0} as its capital?",
      "{0} is the capital city of which country?", "What country is {0} the capital of?",
      "{0} is the capital of what country?", "Whose capital is {0}?", "Of what country is {0} the capital?")),
    (r"On which continent (?:is|does) ([A-Z][\w -]+?)(?: lie)?\?",
     ("What continent is {0} on?", "Which continent is {0} in?", "On what continent is {0}?", "continent of {0}",
      "{0} is on which continent?", "What continent is {0} part of?", "What continent is {0}?",
      "In which continent is {0}?", "Tell me the continent of {0}.", "{0} belongs to which continent?")),
    (r"(?:What is the currency of|Which currency is used in) ([A-Z][^?]*)\?",
     ("What currency does {0} use?", "currency of {0}", "What's the currency of {0}?", "What money is used in {0}?",
      "{0}'s currency", "Which currency does {0} have?", "What currency is used in {0}?",
      "What is the money of {0} called?", "{0} currency")),
    ("Which currency is used in the country",
     ("What currency is used in the country", "What's the currency of the country",
      "What money is used in the country", "Currency of the country")),
    ("On which continent is the country",
     ("What continent is the country on", "Which continent has the country", "On what continent is the country",
      "Continent of the country")),
    # any question
    ("What is ", ("What's ", "Whats ", "what is ", "What\u2019s ")),
    ("Which ", ("What ", "which ")),
))  # fmt: skip
_CONVERSIONS = (
    "{x} in {u}", "{x} to {u}", "Convert {x} to {u}.", "Convert {x} into {u}.", "How many {u} is {x}?", "{x} in {u}?",
    "How many {u} are in {x}?", "How many {u} make {x}?", "What is {x} in {u}?", "Turn {x} into {u}.",
    "{x} = how many {u}?", "How much is {x} in {u}?", "Write {x} in {u}.", "Give {x} in {u}.", "Change {x} to {u}.",
    "How many {u} in {x}?",
)  # fmt: skip

_BEFORE = ("please ", "Please, ", "hey, ", "Hi, ", "ok, ", "so ", "Question: ", "Quick question: ", "Now ", "And ",
           "Tell me: ", "Can you tell me: ", "Help me: ", "I have a question. ", "One more: ")  # fmt: skip
_AFTER = (" please", ", please", " Thanks!", " thanks", ", thank you", " Please answer.", " Can you tell me?")
_BLANKS = (" ", " ", "\n", "\n", "  ", "\n\n", " \n", "\r\n", "\t")
_DATA_CASE = frozenset({"json"})  # kinds whose answer copies the question's capital letters


def rephrase(prompt: str, kind: str, rng: random.Random) -> str:
    """Return `prompt` as another person might type it. Kinds whose answer copies capital letters keep the case."""
    if rng.random() < _WORDED:
        prompt = _in_other_words(prompt, rng)
    if kind == "units" and rng.random() < _NAMED:
        prompt = _UNIT.sub(lambda unit: _UNIT_NAMES[unit[0]], prompt)
    if kind != "talk" and rng.random() < 0.12:
        prompt = f"{rng.choice(_BEFORE)}{prompt}" if rng.random() < 0.6 else f"{prompt}{rng.choice(_AFTER)}"
    prompt = _ended(prompt, rng)
    if kind not in _DATA_CASE and rng.random() < _CASED:
        prompt = prompt.upper() if rng.random() < 0.08 else prompt.lower()
    if rng.random() < _SPACED:
        prompt = _spaced(prompt, rng)
    if rng.random() < 0.35:
        prompt += rng.choice(_BLANKS)
    return f"{rng.choice(_BLANKS)}{prompt}" if rng.random() < 0.08 else prompt


def _in_other_words(prompt: str, rng: random.Random) -> str:
    for plain, expressions, whole in _CALCULATIONS:
        if match := plain.fullmatch(prompt):
            a, b = match.groups()
            forms = expressions
            if rng.random() < _SPELT and max(int(a), int(b)) < len(_NUMBERS):
                a, b = _NUMBERS[int(a)], _NUMBERS[int(b)]
                forms = [form for form in expressions if " " in form and form.islower()]
            if rng.random() < 0.12:
                return rng.choice(whole).format(a=a, b=b)
            return rng.choice(_EXPRESSION).format(e=rng.choice(forms).format(a=a, b=b))
    for old, new in _RULES:
        if rng.random() < 0.8:
            prompt = old.sub(lambda match, new=new: _replacement(match, new, rng), prompt)
    return prompt


def _replacement(match: re.Match[str], new: tuple[str, ...], rng: random.Random) -> str:
    groups = [group for group in match.groups() if group is not None]
    if new == ("units",):
        unit, amount = groups if groups[1][0].isdigit() else reversed(groups)
        return rng.choice(_CONVERSIONS).format(x=amount, u=unit)
    return rng.choice(new).format(*groups)


def _ended(prompt: str, rng: random.Random) -> str:
    """Drop, double, replace or detach the punctuation mark at the end."""
    if not prompt.endswith(("?", ".", "!")) or rng.random() < 0.4:
        return prompt
    bare, mark = prompt[:-1], prompt[-1]
    return bare + rng.choice(("", "", "", f" {mark}", mark * 2, "?" if mark == "." else ".", "!", "..."))


def _spaced(prompt: str, rng: random.Random) -> str:
    """Drop the spaces beside operators, units or punctuation marks, or double or drop a single space elsewhere."""
    match rng.randrange(4):
        case 0:
            return re.sub(r" ?([-+*=,:;]) ?(?=\d)", r"\1", prompt)
        case 1:
            return re.sub(r"(?<=\d) (?=(?:h|min|s|km|m|cm|mm|kg|g|t|l|ml|plus|minus|times)\b)", "", prompt)
        case 2:
            return re.sub(r"([.,:;?]) ", r"\1", prompt)
        case _:
            gaps = [match.start() for match in re.finditer(r"(?<!\d) | (?!\d)", prompt)]
            at = rng.choice(gaps) if gaps else len(prompt)
            return prompt[:at] + rng.choice(("", "  ", "  ")) + prompt[at + 1 :]
