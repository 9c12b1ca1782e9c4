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
# One boundary (RFC 2046): parsers differ on repeated or encoded ones.
_TYPE = re.compile(
    r"""multipart/form-data\s*(?:;\s*charset="?utf-8"?\s*)?
    ;\s*boundary=([\w!#$&'+.^`|~-]{1,70}|"[\w'()+,./:=?\ -]{0,69}[\w'()+,./:=?-]")
    \s*(?:;\s*charset="?utf-8"?\s*)?;?""",
    re.IGNORECASE | re.ASCII | re.VERBOSE,
)
_HEADER = re.compile(r"([!-9;-~]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
# Parsers differ on escapes, which are therefore allowed only in file names.
_DISPOSITION = re.compile(
    r"""form-data(?:\s*;\s*(?:name="(?P<quoted>[^"\\%]*)"|name=(?P<plain>[\w.\[\]-]+)
    |filename="(?:[^"\\]|\\.)*"|filename\*?=[^\s;"]+))+\s*;?""",
    re.IGNORECASE | re.VERBOSE,
)
_NAME = re.compile(r";\s*name[*0-9]*\s*=", re.IGNORECASE)
_UNENCODED = frozenset(("7bit", "8bit", "binary"))


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
        match = _TYPE.fullmatch(content_type)
        if match is None:
            raise InvalidRequestError(
                "Send the file as multipart/form-data with a boundary.", param="file", code="invalid_form"
            )
        #: The content type to forward. It contains nothing that other parsers may read differently.
        self.content_type = f"{FORM}; boundary={match[1]}"
        self._delimiter = b"--" + match[1].strip('"').encode()
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
        if place >= 0 and not self._buffer.endswith(b"\r\n", 0, place):
            raise _broken("a boundary does not begin a line")  # some parsers accept other line ends
        known = max(0, len(self._buffer) - len(self._delimiter) - 1) if place < 0 else place - 2
        if self._in_part and known:
            parts.append(bytes(self._buffer[:known]))
        elif self._buffer[:known].strip():
            raise _broken("there is data before the first boundary")
        self._drop(known)
        if place < 0:
            return False
        after = len(self._delimiter) + 2
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
            if (header := _HEADER.fullmatch(line)) is None:
                raise _broken("a header of a part is malformed")
            message[header[1]] = header[2]
        match = _DISPOSITION.fullmatch(message.get("content-disposition", ""))
        name = match and (match["plain"] or match["quoted"])
        if lines[0] or not name or len(_NAME.findall("\n".join(lines))) != 1:
            raise _broken("a part needs exactly one name, without escapes")  # other parsers may read these differently
        if message.get("content-transfer-encoding", "binary").lower() not in _UNENCODED:
            raise _broken("a part is encoded")
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

    # Content type to forward.
    content_type: str
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
            name = part.name.strip().casefold()
            if name in _READ and (name != part.name or name in seen or part.filename is not None):
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
    return Upload(parser.content_type, model, models[0], stream in (b"true", b"1"), frozenset(seen))


def _broken(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"The form cannot be read: {fault}.", code="invalid_form")
