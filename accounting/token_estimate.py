"""Token estimates before a request: the tokens that it makes a model read, and the most that it lets a model write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from ..protocol.decoding import UNREADABLE, integral
from ..protocol.http.foreign import object_of, objects_of

#: An answer without a limit is reserved in steps of this many tokens, and never capped below them.
STEP_TOKENS = 1024
#: The longest answer of a model whose own maximum is unknown.
LONGEST_ANSWER = 2**17
#: One image, sound or file.
ATTACHED_TOKENS = 1500
#: The tokens of one request end here, whatever it asks for: integers of ledgers and accounts end somewhere.
MAX_REQUEST_TOKENS = 2**40
#: The limits of an answer by path. Other paths write no text, or bill it by other units.
LIMITS: Mapping[str, tuple[str, ...]] = {
    "chat/completions": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
#: Fields that lengthen an answer, or limit the answers of some servers only.
LENGTHENING = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n_predict", "num_predict"),
    *("max_new_tokens", "max_length", "min_length", "min_new_tokens"),
)
#: Paths whose answers are no text.
WRITES_NOTHING = (
    *("embeddings", "rerank", "score", "classify", "pooling", "moderations"),
    *("messages/count_tokens", "responses/input_tokens"),
)
#: Fields that multiply answers.
MULTIPLYING = ("n", "best_of", "num_return_sequences", "num_beams", "candidate_count")
#: Tables of other servers that hold any of these fields.
NESTED = ("options", "parameters", "extra_body", "generation_config", "generationConfig")
#: Tables with a budget for thinking, and the budget's name in each.
THINKING = {"thinking": "budget_tokens", "reasoning": "max_tokens"}
#: All fields that `answer_size` reads, but for the prompts.
LENGTH_FIELDS = (*LENGTHENING, *MULTIPLYING, *NESTED, *THINKING, "prediction")

_COUNTED = frozenset(LENGTH_FIELDS)
_ASCII = bytes(range(128))
_ESCAPE = 6  # characters of `\u20ac`
_ESCAPED_BYTES = 3  # of UTF-8, at most
_BYTES_PER_TOKEN = 3
_ATTACHED = (b'"file_id"', b'"file_data"', b'"data"', b";base64,")
# The parts of a message that are attached: their type, and the path to the data.
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("image_url", ("image_url", "url")),
    ("input_audio", ("input_audio", "data")),
    ("file", ("file", "file_data")),
    ("file", ("file", "file_id")),
    ("input_image", ("image_url",)),
    ("input_file", ("file_data",)),
    ("image", ("source", "data")),
    ("document", ("source", "data")),
)


def prompt_tokens(body: bytes, *, bytes_per_token: int = _BYTES_PER_TOKEN) -> int:
    """Return the tokens of a JSON request. With one byte per token the result is a bound: no token is shorter.

    A character beyond ASCII counts by its bytes in any case. An attachment counts `ATTACHED_TOKENS`.
    """
    attached, count = _attached_bytes(body) if any(map(body.__contains__, _ATTACHED)) else (0, 0)
    beyond = 0 if body.isascii() else len(body.translate(None, _ASCII))
    escaped = body.count(b"\\u")
    plain = max(0, len(body) - beyond - escaped * _ESCAPE - attached)
    return -(-plain // bytes_per_token) + beyond + escaped * _ESCAPED_BYTES + ATTACHED_TOKENS * count


def text_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all texts in decoded JSON, however deep it is."""
    total, values = 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
        elif isinstance(value, dict):
            values.extend(cast("dict[str, Any]", value).values())
        elif isinstance(value, list):
            values.extend(cast("list[Any]", value))
    return total


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The most that a request lets a model write."""

    # Tokens of one answer. None: no limit.
    limit: int | None = None
    # Answers to all prompts together.
    answers: int = 1
    # Tokens billed beside the answers: a prediction, which counts where it is rejected.
    beside: int = 0

    @property
    def least(self) -> int:
        """The tokens without which the request is not sent."""
        limit = STEP_TOKENS if self.limit is None else min(self.limit, STEP_TOKENS)
        return min(limit * self.answers, MAX_REQUEST_TOKENS) + self.beside

    def most(self, longest: int | None) -> int:
        """The tokens of all answers, from a model whose longest answer has `longest`."""
        most = LONGEST_ANSWER if longest is None else longest
        if self.limit is not None:
            most = self.limit if longest is None else min(self.limit, longest)
        return max(self.least, min(most * self.answers, MAX_REQUEST_TOKENS) + self.beside)

    def cap(self, tokens: int) -> int:
        """The limit of one answer, so that all of them together have `tokens` at most."""
        return max(1, (tokens - self.beside) // self.answers)


def answer_size(fields: Mapping[str, Any], path: str, *, prompts: int | None = None) -> AnswerSize:
    """Read the size from a decoded request to `path`. `prompts`: their number, where the caller has counted them."""
    if path not in LIMITS:
        return AnswerSize(0 if path in WRITES_NOTHING else STEP_TOKENS)
    lengths: list[int | None] = []
    answers, thinking, is_limited = 1, 0, False
    tables: list[Mapping[str, Any]] = [fields]
    for table in tables:
        for name in table.keys() & _COUNTED:
            if (value := table[name]) is None:
                continue
            if name in LENGTHENING:
                lengths.append(_count(value))
                is_limited = is_limited or (table is fields and name in LIMITS[path])
            elif name in MULTIPLYING:
                answers = max(answers, _count(value) or 1)
            elif (inner := object_of(value)) and table is fields:
                thinking += _count(inner.get(THINKING.get(name, ""))) or 0
                tables += [inner] if name in NESTED else []
    limit = None
    if is_limited and None not in lengths:
        limit = max([1, *filter(None, lengths)]) + thinking
    if prompts is None:
        given = fields.get("prompt")
        items = cast("list[Any]", given) if isinstance(given, list) else []
        prompts = len(items) if any(isinstance(each, str | list) for each in items) else 1
    beside = min(text_bytes(fields.get("prediction")), MAX_REQUEST_TOKENS)
    return AnswerSize(limit, min(answers * prompts, MAX_REQUEST_TOKENS), beside)


def capped(body: Mapping[str, Any], cap: int, limits: Sequence[str]) -> dict[str, Any]:
    """Return `body` with answers of at most `cap` tokens: in those of `limits` that it has, or else in the first."""
    named = any(body.get(name) is not None for name in limits)
    changed: dict[str, Any] = dict(body) if named else {**body, limits[0]: cap}
    nested = {name: dict(found) for name in NESTED if (found := object_of(body.get(name)))}
    changed |= nested
    for table in (changed, *nested.values()):
        table.update({name: _lower(table[name], cap) for name in LENGTHENING if table.get(name) is not None})
    for name, budget in THINKING.items():  # a part of the answer's limit
        thinking = object_of(body.get(name))
        if (_count(thinking.get(budget)) or 0) >= cap:
            changed[name] = {**thinking, budget: max(1, cap - 1)}
    return changed


def _lower(value: Any, cap: int) -> int:
    count = _count(value)
    return cap if count is None else min(count, cap)


def _count(value: Any) -> int | None:
    """`value` if it is a count; None also for -1, with which some servers mean no limit."""
    count = integral(value)
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def _attached_bytes(body: bytes) -> tuple[int, int]:
    """The bytes of all attachments in a request, and their number. Elsewhere such data is read as text."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return 0, 0
    found = [len(each) for each in _attached(fields)]
    return sum(found), len(found)


def _attached(fields: Mapping[str, Any]) -> Iterator[str]:
    for messages in (fields.get("messages"), fields.get("input")):
        for message in objects_of(messages):
            for part in objects_of(message.get("content")):
                for kind, path in _PARTS:
                    data: Any = part if part.get("type") == kind else None
                    for name in path:
                        data = object_of(data).get(name)
                    if isinstance(data, str):
                        yield data
