"""Prompt normalisation, and extraction of the question from agent harnesses and chat logs.

An agent harness wraps every question in the same long text, and a gate that read this text would decide the same for
all of them. Therefore only the user's last question is kept. A text without a known wrapping is returned unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator

from ...protocol.unicode_forms import normalized

_MEANT = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")  # Unicode decompositions that change the meaning
_TYPED = (
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | {"\u2044": "/"}
)
_UNSEEN = "Cf"  # Unicode category of joiners, soft hyphens and direction marks
_SELECTORS = range(0xFE00, 0xFE10)  # variation selectors, which change only the look of a character
# Start of a turn; the groups match the name of the speaker.
_TOKEN_TURN = re.compile(
    r"<\|im_start\|>[ \t]*(\w+)|<\|start_header_id\|>[ \t]*(\w+)[ \t]*<\|end_header_id\|>|<\|(user|assistant|system)\|>"
)
_PLAIN_TURN = re.compile(
    r"^(?:#{1,4} |\*\*|\[)?(user|human|assistant|ai|system|tool)(?:\]|\*\*)?:(?:\*\*)?(?=\s|$)",
    re.IGNORECASE | re.MULTILINE,
)
_TURN_END = re.compile(r"<\|(?:im_end|eot_id|end|endoftext)\|>|</s>")
_USERS = ("user", "human")
_QUESTION_TAG = re.compile(r"<(user_query|user_message|user_request|question|query|task|prompt)>", re.IGNORECASE)
_CONTEXT_TAG = re.compile(
    r"<(system-reminder|system|environment_details|environment_context|context|tools|tool_result|instructions"
    r"|available_skills|attached_files|files|documents|examples?)(?:\s[^<>]*)?>",
    re.IGNORECASE,
)
_CLOSING_TAG = re.compile(r"</([a-z_-]+)>", re.IGNORECASE)


def normalized_prompt(text: str) -> str:
    """Return `text` in lower case, with each run of blanks or of line breaks collapsed, and both ends stripped.

    Every gate reads this form, so that ways of typing a text cannot change a decision: full-width and other
    compatibility forms, composed and decomposed letters, curly quotation marks, kinds of dashes and invisible
    characters are unified. Superscripts stay different from digits, and "½" stays different from "1/2".
    """
    lines = (" ".join(line.split()) for line in _letters(text).splitlines())
    return "\n".join(line for line in lines if line)


def _letters(text: str) -> str:
    if text.isascii():
        return text.lower()
    foreign = [c for c in set(text) if not c.isascii()]  # only these few characters need the slow steps
    for character in foreign:
        if unicodedata.category(character) == _UNSEEN or ord(character) in _SELECTORS:
            text = text.replace(character, "")
    composed = "".join(re.escape(c) for c in foreign if unicodedata.decomposition(c).startswith(_MEANT))
    pieces = re.split(f"([{composed}])", text) if composed else [text]
    # Odd pieces are characters of `composed`. NFKC runs before and after case folding, which may decompose letters.
    pieces[::2] = [normalized("NFKC", normalized("NFKC", piece).casefold()) for piece in pieces[::2]]
    text = "".join(pieces)
    for character in _TYPED.keys() & set(text):
        text = text.replace(character, _TYPED[character])
    return text


def question_of(text: str) -> str:
    """Return the question in the last user turn of `text`: the content of the turn's last question tag, if any.

    Otherwise return the turn without its context tags.
    """
    turn = _last_user_turn(text)
    if "</" not in turn:
        return turn
    tagged = [turn[begin:end] for _, begin, end, _ in _elements(_QUESTION_TAG, turn)]
    if tagged and tagged[-1].strip():
        return tagged[-1].strip()
    parts, at = list[str](), 0
    for start, _, _, after in _elements(_CONTEXT_TAG, turn):
        parts.append(turn[at:start])
        at = after
    return "".join([*parts, turn[at:]]).strip() or turn


def _elements(opening: re.Pattern[str], text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the start of each element, the start and end of its content, and its end. An element ends at the first
    closing tag of its name; nested elements are skipped. A single pass over the tags takes linear time on any text.
    """
    closings: dict[str, list[int]] = {}
    for tag in _CLOSING_TAG.finditer(text):
        closings.setdefault(tag[1].casefold(), []).append(tag.start())
    after = 0
    for tag in opening.finditer(text):
        name = tag[1].casefold()
        places = closings.get(name, [])
        index = bisect_left(places, tag.end())
        if tag.start() < after or index == len(places):
            continue
        after = places[index] + len(f"</{name}>")
        yield tag.start(), tag.end(), places[index], after


def _last_user_turn(text: str) -> str:
    # Most questions have no turn markers, so this check for markers must be cheap.
    if "<|" in text:
        turns = list(_TOKEN_TURN.finditer(text))
    elif any(speaker in text.lower() for speaker in _USERS):
        turns = list(_PLAIN_TURN.finditer(text))
    else:
        return text
    speakers = ["".join(group or "" for group in turn.groups()).lower() for turn in turns]
    user_turns = [i for i, speaker in enumerate(speakers) if speaker in _USERS]
    # A single marker may be part of the question ("User: root was not found"), so at least two are needed.
    if not user_turns or len(turns) < 2:
        return text
    last = user_turns[-1]
    end = turns[last + 1].start() if last + 1 < len(turns) else len(text)
    question = _TURN_END.sub("", text[turns[last].end() : end]).strip()
    return question or text
