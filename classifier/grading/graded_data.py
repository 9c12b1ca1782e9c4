"""Reads graded prompts: what both tiers scored on each, from a CSV or JSON Lines file (also gzipped).

One row is one prompt, or a conversation that ends with one (`messages`), with the weak and the strong tier's score in
[0, 1]; the weak tier's answer, its token signals and its hidden states are read where the file has them, and then every
row must. Whatever cannot be used is refused with the line that is wrong, never skipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from ...protocol.errors import InvalidRequestError
from ...protocol.requests import Message
from ...protocol.responses import MAX_TOKENS
from ...protocol.unicode_forms import text_lines
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
_MAX_SIGNAL = float(np.finfo(np.float32).max)  # nats, and far beyond any


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that hold the two tiers' scores; None means those named weak and strong, or local and cloud."""

    weak: str | None = None
    strong: str | None = None


class _Header(NamedTuple):
    prompt: str
    weak: str
    strong: str


def read_graded(path: Path, columns: Columns | None = None) -> list[GradedRow]:
    """The rows of `path` in order. Raises InvalidRequestError, naming file, line and column."""
    columns = columns or Columns()
    try:
        with _opened(path) as file:
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
    """One row without an answer would leave all of them without the gate that reads answers."""
    if any(has) and not all(has):
        raise InvalidRequestError(
            f"{path}, line {lines[has.index(False)]}: no {what}, which {sum(has)} of {len(has)} rows have (line "
            f"{next(compress(lines, has))} is the first): give every row its own, or none."
        )


def write_graded(path: Path, rows: Sequence[GradedRow]) -> None:
    """Rows as JSON Lines that `read_graded` takes. Raises InvalidRequestError if the file cannot be written."""
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


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _records(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields of each record."""
    names = [suffix for suffix in path.suffixes if suffix != ".gz"]
    form = names[-1] if names else ""
    if form == ".csv":
        # Answers may be longer than the reader's own limit of 131,072 characters; the limit is the process's.
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
        reader = csv.DictReader(file, strict=True)
        twice = [name for name, n in Counter(reader.fieldnames or ()).items() if n > 1 and name]
        if twice:
            raise InvalidRequestError(f"{path}: {twice[0]!r} names more than one column: rename all but one of them.")
        for record in reader:
            if None in record or None in record.values():
                raise InvalidRequestError(f"{path}, line {reader.line_num}: not as many fields as the first line has.")
            yield reader.line_num, record
    elif form in (".jsonl", ".ndjson"):
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _json_object(f"{path}, line {number}", line)
    else:
        raise InvalidRequestError(f"{path}: the name must end in .csv or .jsonl, or either with .gz.")


def _json_object(where: str, line: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {error}") from error


def _header(path: Path, record: Mapping[str, Any], columns: Columns) -> _Header:
    def wanted(given: str | None, known: tuple[str, ...], what: str, remedy: str) -> str:
        there = (each for each in known if each in record)  # null, perhaps: the row's error then says so
        name = given or _found(record, known) or next(there, None)
        if name is None or name not in record:
            missing = f"no column {given!r}" if given is not None else f"no {what} (looked for {', '.join(known)})"
            raise InvalidRequestError(f"{path} has {missing}{remedy}. Its columns: {', '.join(record)}.")
        return name

    prompt = _found(record, _PROMPTS) or _PROMPTS[0]
    if record.get(_MESSAGES) in (None, ""):
        prompt = wanted(None, _PROMPTS, "prompt or messages", "")
    return _Header(
        prompt,
        wanted(columns.weak, _WEAK, "weak score", ": name it with --weak"),
        wanted(columns.strong, _STRONG, "strong score", ": name it with --strong"),
    )


def _found(record: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """The first of the known names under which there is something, null being nothing."""
    return next((name for name in known if record.get(name) is not None), None)


def _row(where: str, record: Mapping[str, Any], header: _Header) -> GradedRow:
    messages = _conversation(where, record)
    prompt = PromptView.of(messages).text if messages else _text(where, record, header.prompt)
    if not prompt.strip():
        raise InvalidRequestError(f"{where}: the {header.prompt} is empty.")
    domain, answer = (_found(record, known) for known in (_DOMAINS, _ANSWERS))
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
    """In CSV it is JSON in a field."""
    value = record.get(_MESSAGES)
    if value in (None, ""):
        return None
    try:
        raw = msgspec.json.decode(value) if isinstance(value, str) else value
        messages = msgspec.convert(raw, tuple[Message, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: messages must be a list of messages ({error}).") from error
    if not messages or messages[-1].role != "user":
        raise InvalidRequestError(f"{where}: messages must end with what the user asks.")
    return messages


def _text(where: str, record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}: {column} must be a text, not {value!r}.")
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
    """None where the row has none of the three; an empty field of CSV is none."""
    missing = [name for name in _SIGNALS if record.get(name) in (None, "")]
    if len(missing) == len(_SIGNALS):
        return None
    if missing:
        raise InvalidRequestError(f"{where}: no {missing[0]}: give all of {', '.join(_SIGNALS)}, or none of them.")
    series = [_series(where, record, name) for name in _SIGNALS]
    if len({len(values) for values in series}) != 1:
        raise InvalidRequestError(f"{where}: {', '.join(_SIGNALS)} must have one entry per token each.")
    return AnswerSignals(*series)


def _states(where: str, record: Mapping[str, Any]) -> ModelStates | None:
    """None where the row has no hidden state of its prompt."""
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
                f"{where}: {name} must hold a finite number for each token, and that of token {token} is {entry!r}: "
                f"mend it, or leave {', '.join(_STATES if name in _STATES else _SIGNALS)} out of every row."
            )
    return np.array(entries, np.float32)
