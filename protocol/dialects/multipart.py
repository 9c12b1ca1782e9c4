"""Streaming parser of `multipart/form-data` (RFC 7578), which never needs a whole file in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from email.message import Message

from ..errors import InvalidRequestError
from ..safety.names import MAX_NAME

FORM = "multipart/form-data"
_MAX_HEAD = 2**12  # maximum bytes of headers per part
_MAX_PARTS = 64
_READ = ("model", "stream")  # fields that affect routing and the kind of response
_MAX_BOUNDARY = 70  # RFC 2046
_NAME = re.compile(r";\s*name[*0-9]*\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormPart:
    """Start of a form field, which is followed by the pieces of the value."""

    name: str
    # File name; None if the field is not a file.
    filename: str | None
    # Offset of the value in the body, in bytes.
    start: int


class FormParser:
    """Incremental parser. Raises InvalidRequestError if the body is not a valid form."""

    def __init__(self, content_type: str) -> None:
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary("")
        if message.get_content_type() != FORM or not 0 < len(boundary) <= _MAX_BOUNDARY:
            raise InvalidRequestError(
                "Send the file as multipart/form-data with a boundary.", param="file", code="invalid_form"
            )
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # supplies the CRLF that the first delimiter may lack
        self._read = -2  # offset of the buffer in the body, in bytes
        self._parts = 0
        self._in_part = False
        self._ended = False

    def feed(self, data: bytes) -> list[FormPart | bytes]:
        """Parse more of the body; return the starts of fields and pieces of values completed by `data`."""
        self._buffer += data
        parts: list[FormPart | bytes] = []
        while not self._ended and self._step(parts):
            pass
        if self._ended:
            if self._buffer.strip():
                raise _broken("there is data after the final boundary")
            self._buffer.clear()
        return parts

    def end(self) -> None:
        if not self._ended:
            raise _broken("the final boundary is missing")

    def _step(self, parts: list[FormPart | bytes]) -> bool:
        """Parse up to the next field. Returns False if that needs more data or the form has ended."""
        place = self._buffer.find(self._delimiter)
        known = len(self._buffer) - len(self._delimiter) + 1 if place < 0 else place
        if known > 0:
            if self._in_part:
                parts.append(bytes(self._buffer[:known]))
            self._drop(known)
        if place < 0:
            return False
        after = len(self._delimiter)
        if self._buffer.startswith(b"--", after):
            self._ended = True
            self._drop(after + 2)
            return False
        head_end = self._buffer.find(b"\r\n\r\n", after)
        if head_end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise _broken("the headers of a part are too long")
            return False
        head = bytes(self._buffer[after:head_end])
        self._drop(head_end + 4)
        parts.append(self._part(head))
        self._in_part = True
        return True

    def _drop(self, size: int) -> None:
        del self._buffer[:size]
        self._read += size

    def _part(self, head: bytes) -> FormPart:
        self._parts += 1
        if self._parts > _MAX_PARTS or len(head) > _MAX_HEAD:
            raise _broken(f"there are more than {_MAX_PARTS} parts, or the headers of a part are too long")
        try:
            lines = head.decode().split("\r\n")
        except UnicodeDecodeError as error:
            raise _broken("the headers of a part are not UTF-8") from error
        message = Message()
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if colon and name.strip().lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        name = message.get_param("name", header="content-disposition")
        if lines[0].strip() or not isinstance(name, str) or message.get_content_disposition() != "form-data":
            raise _broken("a part has no name")
        if len(_NAME.findall("\n".join(lines))) != 1 or any(line[:1].isspace() for line in lines):
            raise _broken("a part has several names, or folded headers")  # other parsers may read these differently
        return FormPart(name, message.get_filename(), self._read)


async def read_form(content_type: str, pieces: AsyncIterator[bytes]) -> AsyncGenerator[FormPart | bytes]:
    """Yield the start of each form field, followed by the pieces of the value. Raises InvalidRequestError."""
    parser = FormParser(content_type)
    async for piece in pieces:
        for part in parser.feed(piece):
            yield part
    parser.end()


@dataclass(frozen=True, slots=True)
class Upload:
    """Routing fields of a form that is forwarded unchanged."""

    # Requested model.
    model: str
    # Position of the model's name in the body, in bytes.
    place: slice
    # Whether a streamed answer is requested.
    stream: bool
    # Names of all fields.
    names: frozenset[str]


def read_upload(content_type: str, body: bytes) -> Upload:
    """Read the routing fields of a form. Raises InvalidRequestError if the form is malformed or ambiguous."""
    parser = FormParser(content_type)
    models, seen = list[slice](), set[str]()
    stream, part = b"", FormPart("", None, 0)
    for piece in parser.feed(body):
        if isinstance(piece, FormPart):
            part = piece
            if (name := part.name.casefold()) in _READ and (name != part.name or part.name in seen):
                raise InvalidRequestError(
                    f"The form must have exactly one field {name}, in lower case.", param=name, code="invalid_form"
                )
            seen.add(part.name)
            if part.name == "model":
                models.append(slice(part.start, part.start))
        elif part.name == "model":
            models[-1] = slice(part.start, part.start + len(piece))
        elif part.name == "stream":
            stream = piece.lower()
    parser.end()
    given = body[models[0]] if models else b""
    if not 0 < len(given) <= 4 * MAX_NAME or len(model := given.decode(errors="replace")) > MAX_NAME:
        raise InvalidRequestError("The form must have a field model with the model's name.", param="model")
    return Upload(model, models[0], stream in (b"true", b"1"), frozenset(seen))


def _broken(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"The form cannot be read: {fault}.", code="invalid_form")
