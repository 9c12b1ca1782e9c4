"""Forms with files (`multipart/form-data`, RFC 7578), read piece by piece: no file is ever whole in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from email.message import Message

from ....protocol.errors import InvalidRequestError

_MAX_HEAD = 2**13  # bytes of the headers of one part
_MAX_PARTS = 32
_MAX_BOUNDARY = 70  # RFC 2046


@dataclass(frozen=True, slots=True)
class FormPart:
    """The beginning of one field. Its value follows, in pieces."""

    name: str
    # None: it is no file.
    filename: str | None


class FormParser:
    """Takes the body in pieces of any size. Raises InvalidRequestError for what is no form."""

    def __init__(self, content_type: str) -> None:
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary("")
        if message.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
            raise InvalidRequestError(
                "Send the file as multipart/form-data with a boundary.", param="file", code="invalid_form"
            )
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # the first delimiter may be the very beginning
        self._parts = 0
        self._in_part = False
        self._ended = False

    def feed(self, data: bytes) -> list[FormPart | bytes]:
        """The parts that are complete by now: beginnings, each followed by the pieces of its value."""
        self._buffer += data
        found: list[FormPart | bytes] = []
        while not self._ended and self._step(found):
            pass
        if self._ended:
            self._buffer.clear()
        return found

    def end(self) -> None:
        if not self._ended:
            raise _broken("it ends in the middle")

    def _step(self, found: list[FormPart | bytes]) -> bool:
        """Read on to the next part. False: that takes more data."""
        place = self._buffer.find(self._delimiter)
        known = len(self._buffer) - len(self._delimiter) + 1 if place < 0 else place
        if known > 0:
            if self._in_part:
                found.append(bytes(self._buffer[:known]))
            del self._buffer[:known]
        if place < 0:
            return False
        after = len(self._delimiter)
        if self._buffer.startswith(b"--", after):
            self._ended = True
            return False
        head_end = self._buffer.find(b"\r\n\r\n", after)
        if head_end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise _broken("a part has a head without an end")
            return False
        head = bytes(self._buffer[after:head_end])
        del self._buffer[: head_end + 4]
        found.append(self._part(head))
        self._in_part = True
        return True

    def _part(self, head: bytes) -> FormPart:
        self._parts += 1
        if self._parts > _MAX_PARTS or len(head) > _MAX_HEAD:
            raise _broken(f"it has more than {_MAX_PARTS} parts, or a part with a long head")
        try:
            lines = head.decode().split("\r\n")
        except UnicodeDecodeError as error:
            raise _broken("the head of a part is no UTF-8") from error
        message = Message()
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if colon and name.strip().lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        name = message.get_param("name", header="content-disposition")
        if lines[0].strip() or not isinstance(name, str) or message.get_content_disposition() != "form-data":
            raise _broken("a part has no name")
        return FormPart(name, message.get_filename())


async def read_form(content_type: str, pieces: AsyncIterator[bytes]) -> AsyncGenerator[FormPart | bytes]:
    """The parts of a form, each followed by the pieces of its value. Raises InvalidRequestError."""
    parser = FormParser(content_type)
    async for piece in pieces:
        for found in parser.feed(piece):
            yield found
    parser.end()


def _broken(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"The form cannot be read: {fault}.", code="invalid_form")
