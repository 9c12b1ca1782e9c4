"""Content that no privacy rule can read: pictures, sounds, files, token IDs, data, and unknown kinds of parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...protocol.http.lenient_json import object_of, rows, table
from .escapes import has_data

TOO_LONG = "text beyond the length limit"
IMAGE, AUDIO, FILE = "an image", "audio", "a file"
TOKEN_IDS, DATA, PART = "token ids", "encoded data", "a content part of an unknown kind"
UNREADABLE = frozenset({TOO_LONG, IMAGE, AUDIO, FILE, TOKEN_IDS, DATA, PART})

_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
_KINDS = {
    re.compile("image|picture|photo|video|screenshot", re.IGNORECASE): IMAGE,
    re.compile("audio|voice|sound", re.IGNORECASE): AUDIO,
    re.compile("file|document|attachment|blob|media", re.IGNORECASE): FILE,
}
# Fields that refer to content other than text, even if they hold only a name or an address.
_REFERENCES = {"image_url": IMAGE, "input_image": IMAGE, "images": IMAGE, "video_url": IMAGE} | {
    "input_audio": AUDIO, "audio_url": AUDIO, "file_id": FILE, "file_ids": FILE, "file_data": FILE, "file_url": FILE,
}  # fmt: skip
# Fields that refer to content other than text only if their value is more than a string.
_OBJECTS = {"image": IMAGE, "video": IMAGE, "audio": AUDIO, "file": FILE, "files": FILE, "document": FILE}
# Schemas and options, which contain only texts and numbers, even under names such as `audio`.
_OPTIONS = (
    "tools", "functions", "tool_choice", "function_call", "response_format", "guided_json", "structured_outputs",
    "json_schema",
    "stop_token_ids", "logit_bias", "modalities", "audio", "stream_options",
)  # fmt: skip
_DATA_URI = re.compile(r"\bdata:(?:([a-z]{1,32})/[\w.+-]{1,128})?[\w.+;=-]{0,200};base64,", re.ASCII | re.IGNORECASE)


def unreadable_field(body: dict[str, Any]) -> str | None:
    """Return the kind of the first field or part that is not text, as one of `UNREADABLE`, or None."""
    fields = {name: value for name, value in body.items() if name not in _OPTIONS}
    if all(isinstance(value, str) for value in object_of(fields.get("metadata")).values()):
        fields.pop("metadata", None)  # only names and texts
    waiting: list[Any] = [fields]
    while waiting:
        value = waiting.pop()
        if (entries := table(value)) is not None:
            if (kind := next(_in_object(entries), None)) is not None:
                return kind
            waiting.extend(entries.values())
        elif items := rows(value):
            if all(isinstance(item, int | float) for item in items):
                return TOKEN_IDS
            waiting.extend(items)
    return None


def unreadable_text(text: str) -> str | None:
    """Return the kind of non-text data in `text`, as one of `UNREADABLE`, or None."""
    if (match := _DATA_URI.search(text)) is not None:
        return _kind(match[1] or "") or DATA
    return DATA if has_data(text) else None


def _in_object(entries: dict[str, Any]) -> Iterator[str]:
    content = entries.get("content")
    for part in rows(content) or ([] if isinstance(content, str | None) else [content]):
        kind = object_of(part).get("type")
        if not isinstance(part, str) and kind not in _TEXT_PARTS:
            yield (_kind(kind) if isinstance(kind, str) else None) or PART
    if isinstance(kind := entries.get("type"), str) and (named := _kind(kind)) is not None:
        yield named
    for name, value in entries.items():
        if value and name in _REFERENCES:
            yield _REFERENCES[name]
        if value and name in _OBJECTS and not isinstance(value, str):
            yield _OBJECTS[name]
        if name in ("prompt", "input") and isinstance(value, int | float):
            yield TOKEN_IDS


def _kind(name: str) -> str | None:
    return next((kind for pattern, kind in _KINDS.items() if pattern.search(name)), None)
