"""Reading graded prompts (both tiers' scores) from a CSV or JSON Lines file, optionally gzipped.

A row is one prompt, or a conversation that ends with one (`messages`), with the weak and the strong tier's score in [0,
1]. The weak tier's answer, token signals and hidden states are optional, but must then be in every row. Rows that
cannot be used are rejected with their line number, never skipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from ...protocol.errors import InvalidRequestError
from ...protocol.requests import Message
from ...protocol.responses import MAX_TOKENS
from ...protocol.unicode_forms import text_lines
from ...protocol.validation_messages import plain_words
from ..arrays import Array
from ..features.gate_inputs import PromptView
from ..graded_row import AnswerSignals, GradedRow, ModelStates

_PROMPTS = ("prompt", "question", "query")
_WEAK, _STRONG = ("weak", "weak_score", "local", "local_score"), ("strong", "strong_score", "cloud", "cloud_score")
_ANSWERS = ("weak_response", "weak_answer", "local_response", "local_answer")
_DOMAINS = ("domain", "category", "kind")
_CLOUD_READ, _CLOUD_WRITTEN, _MESSAGES = "cloud_prompt_tokens", "cloud_tokens", "messages"
_SIGNALS = ("logprobs", "entropies", "margins")
_STATES = ("prompt_logprobs", "prompt_hidden", "answer_hidden")
_FAMILY, _FINISH_REASON = "family", "finish_reason"
_MAX_FIELD = 10_000_000
_MAX_SIGNAL = float(np.finfo(np.float32).max)  # limit in nats, beyond any real value


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the two tiers' scores. None: search for known names, such as weak and strong, or local and cloud."""

    weak: str | None = None
    strong: str | None = None


class _Header(NamedTuple):
    prompt: str
    weak: str
    strong: str


def read_graded(path: Path, columns: Columns | None = None) -> list[GradedRow]:
    """Return the rows of `path` in order. Raises InvalidRequestError, naming file, line and column."""
    columns = columns or Columns()
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            records = _records(path, text_lines(file, path, InvalidRequestError))
            rows: list[GradedRow] = []
            lines: list[int] = []
            header: _Header | None = None
            for line, record in records:
                header = header or _header(path, record, columns)
                rows.append(_row(f"{path}, line {line}", record, header))
                lines.append(line)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise InvalidRequestError(f"Cannot read {path} as CSV or JSON Lines: {error}") from error
    if not rows:
        raise InvalidRequestError(f"{path} holds no rows: give prompts with a weak and a strong score each.")
    if any(row.messages for row in rows):
        rows = [replace(row, messages=row.messages or (Message(role="user", content=row.prompt),)) for row in rows]
    for name, columns_of in (("answer", _ANSWERS[:1]), ("signals", _SIGNALS), ("states", _STATES)):
        _check_whole(path, lines, [getattr(row, name) is not None for row in rows], ", ".join(columns_of))
    return rows


def _check_whole(path: Path, lines: Sequence[int], has: Sequence[bool], what: str) -> None:
    """Raise InvalidRequestError if only some rows have the field, because a gate needs the field in every row."""
    if any(has) and not all(has):
        raise InvalidRequestError(
            f"{path}, line {lines[has.index(False)]}: no {what}, but {sum(has)} of {len(has)} rows have it (line "
            f"{next(compress(lines, has))} is the first): add it to every row, or to none."
        )


def write_graded(path: Path, rows: Sequence[GradedRow]) -> None:
    """Write rows as JSON Lines for `read_graded`. Raises InvalidRequestError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(json.dumps(_record(row)).encode() + b"\n" for row in rows))
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error}") from error


def _record(row: GradedRow) -> dict[str, Any]:
    record: dict[str, Any] = {"prompt": row.prompt, "weak": row.weak, "strong": row.strong, "domain": row.domain}
    if row.answer is not None:
        record["weak_response"] = row.answer
    if row.signals is not None:
        record |= {name: getattr(row.signals, name).tolist() for name in _SIGNALS}
    if row.states is not None:
        record |= {name: getattr(row.states, name).tolist() for name in _STATES}
        record |= {_FINISH_REASON: row.states.finish_reason, _FAMILY: row.family}
    if row.messages is not None:
        record[_MESSAGES] = msgspec.to_builtins(row.messages)
    return record | {_CLOUD_READ: row.cloud_read, _CLOUD_WRITTEN: row.cloud_written}


def _records(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the line number and the fields of each record."""
    names = [suffix for suffix in path.suffixes if suffix != ".gz"]
    form = names[-1] if names else ""
    if form == ".csv":
        # Answers may exceed the csv module's default limit of 131,072 characters, which is global to the process.
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
        reader = csv.DictReader(file, strict=True)
        twice = [name for name, n in Counter(reader.fieldnames or ()).items() if n > 1 and name]
        if twice:
            raise InvalidRequestError(f"{path}: {twice[0]!r} names more than one column: rename all but one of them.")
        for record in reader:
            if None in record or None in record.values():
                raise InvalidRequestError(f"{path}, line {reader.line_num}: expected as many fields as in the header.")
            yield reader.line_num, record
    elif form in (".jsonl", ".ndjson"):
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _json_object(f"{path}, line {number}", line)
    else:
        raise InvalidRequestError(f"{path}: the name must end in .csv, .jsonl or .ndjson, or one of these with .gz.")


def _json_object(where: str, line: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {plain_words(error)}") from error


def _header(path: Path, record: Mapping[str, Any], columns: Columns) -> _Header:
    def wanted(option: str | None, usual: tuple[str, ...], what: str, remedy: str) -> str:
        there = (column for column in usual if column in record)  # null values are reported later, with their line
        name = option or _first_given(record, usual) or next(there, None)
        if name is None or name not in record:
            missing = f"no column {option!r}" if option is not None else f"no {what} (looked for {', '.join(usual)})"
            raise InvalidRequestError(f"{path} has {missing}{remedy}. Its columns: {', '.join(record)}.")
        return name

    prompt = _first_given(record, _PROMPTS) or _PROMPTS[0]
    if record.get(_MESSAGES) in (None, ""):
        prompt = wanted(None, _PROMPTS, "prompt or messages", "")
    return _Header(
        prompt,
        wanted(columns.weak, _WEAK, "weak score", ": name the column with --weak"),
        wanted(columns.strong, _STRONG, "strong score", ": name the column with --strong"),
    )


def _first_given(record: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """Return the first of the known names whose value is not null."""
    return next((name for name in columns if record.get(name) is not None), None)


def _row(where: str, record: Mapping[str, Any], header: _Header) -> GradedRow:
    messages = _conversation(where, record)
    prompt = PromptView.of(messages).text if messages else _text(where, record, header.prompt)
    if not prompt.strip():
        raise InvalidRequestError(f"{where}: the {header.prompt} is empty.")
    domain, answer = (_first_given(record, columns) for columns in (_DOMAINS, _ANSWERS))
    return GradedRow(
        prompt,
        _score(where, record, header.weak),
        _score(where, record, header.strong),
        _text(where, record, domain) if domain else "",
        _text(where, record, answer) if answer else None,
        _signals(where, record),
        _tokens(where, record, _CLOUD_READ),
        _tokens(where, record, _CLOUD_WRITTEN),
        _states(where, record),
        _text(where, record, _FAMILY) if record.get(_FAMILY) is not None else "",
        messages=messages,
    )


def _conversation(where: str, record: Mapping[str, Any]) -> tuple[Message, ...] | None:
    """Parse the conversation, which a CSV file stores as JSON in one field."""
    value = record.get(_MESSAGES)
    if value in (None, ""):
        return None
    try:
        raw = msgspec.json.decode(value) if isinstance(value, str) else value
        messages = msgspec.convert(raw, tuple[Message, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: messages must be a list of messages ({plain_words(error)}).") from error
    if not messages or messages[-1].role != "user":
        raise InvalidRequestError(f"{where}: messages must end with a message from the user.")
    return messages


def _text(where: str, record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}: {column} must be a string, not {value!r}.")
    return value


def _score(where: str, record: Mapping[str, Any], column: str) -> float:
    return _number(where, column, record.get(column), 1, "a score from 0 to 1")


def _tokens(where: str, record: Mapping[str, Any], column: str) -> float | None:
    value = record.get(column)
    return None if value in (None, "") else _number(where, column, value, MAX_TOKENS, "a number of tokens")


def _number(where: str, column: str, value: Any, most: int, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= most:
        raise InvalidRequestError(f"{where}: {column} must be {what}, not {value!r}.")
    return number


def _signals(where: str, record: Mapping[str, Any]) -> AnswerSignals | None:
    """Return the token signals, or None if the row lacks all three series. An empty CSV field counts as missing."""
    missing = [name for name in _SIGNALS if record.get(name) in (None, "")]
    if len(missing) == len(_SIGNALS):
        return None
    if missing:
        raise InvalidRequestError(f"{where}: {missing[0]} is missing: give all of {', '.join(_SIGNALS)}, or none.")
    series = [_series(where, record, name) for name in _SIGNALS]
    if len({len(values) for values in series}) != 1:
        raise InvalidRequestError(f"{where}: {', '.join(_SIGNALS)} must have one entry per token.")
    return AnswerSignals(*series)


def _states(where: str, record: Mapping[str, Any]) -> ModelStates | None:
    """Return the hidden states, or None if the row has no hidden state of its prompt."""
    if record.get("prompt_hidden") in (None, ""):
        return None
    logprobs, prompt_hidden, answer_hidden = (_series(where, record, name) for name in _STATES)
    return ModelStates(logprobs, prompt_hidden, answer_hidden, _text(where, record, _FINISH_REASON))


def _series(where: str, record: Mapping[str, Any], name: str) -> Array:
    value = record.get(name)
    try:
        entries = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {name} must be a list of numbers ({error}).") from error
    if not isinstance(entries, list):
        raise InvalidRequestError(f"{where}: {name} must be a list of numbers, one per token, not {entries!r}.")
    for token, entry in enumerate(cast("list[object]", entries)):
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not abs(entry) <= _MAX_SIGNAL:
            raise InvalidRequestError(
                f"{where}: {name} must hold a finite number for each token, but token {token} has {entry!r}: "
                f"fix it, or leave {', '.join(_STATES if name in _STATES else _SIGNALS)} out of every row."
            )
    return np.array(entries, np.float32)
