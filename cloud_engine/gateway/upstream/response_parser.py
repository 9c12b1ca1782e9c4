"""Incremental HTTP/1.1 response parser: strict about framing, in linear time.

Body bytes are returned as they arrive and not stored. Tests compare the parser with h11, which is several times slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .failures import UpstreamFailure

Headers = list[tuple[bytes, bytes]]

_MAX_HEAD = 2**16
_MAX_LINE = 2**12  # bytes of a chunk-size line with extensions, or of a trailer
_MAX_TRAILERS = 64
_MAX_HEADERS = 256
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\0\r\n]*)?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\0\r\n]*?)[ \t]*")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\0\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_NO_BODY = frozenset({204, 304})


class ResponseParser:
    """Parses one response. `has_begun`: a byte has arrived. `reusable`: the connection may be kept once `complete`."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is parsed
        self.headers: Headers = []
        self.complete = False
        self.reusable = False
        self.has_begun = False
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer already searched for a line end
        self._left = 0  # bytes left of the body, or of the current chunk
        self._trailers = 0
        self._step: Callable[[list[bytes]], bool] = self._head

    def feed(self, data: bytes) -> bytes:
        """Parse `data`, and return the body bytes. Raises UpstreamFailure for malformed HTTP."""
        self.has_begun = True
        if self._step == self._size and not self._buffer and (piece := _single_chunk(data)) is not None:
            return piece
        self._buffer += data
        body: list[bytes] = []
        while self._step(body):
            pass
        return body[0] if len(body) == 1 else b"".join(body)

    def feed_end(self) -> None:
        """Handle the end of the connection. Raises UpstreamFailure if the response is incomplete."""
        if self._step == self._until_end:
            self.complete = True
        if not self.complete:
            raise UpstreamFailure("the connection was closed in the middle of the response")

    def _head(self, _body: list[bytes]) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._searched)
        if (end if end >= 0 else len(self._buffer)) > _MAX_HEAD:
            raise UpstreamFailure(f"the response head is longer than {_MAX_HEAD} bytes")
        if end < 0:
            self._searched = max(len(self._buffer) - 3, 0)
            return False
        status_line, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        self._consume(end + 4)
        status = _STATUS.fullmatch(status_line)
        headers = [_HEADER.fullmatch(line) for line in lines]
        if status is None or None in headers or len(headers) > _MAX_HEADERS:
            raise UpstreamFailure("the response head is not valid HTTP/1.1")
        code = int(status[2])
        if 100 <= code < 200:
            if code == 101:
                raise UpstreamFailure("the node tried to switch protocols")
            return True  # an interim response: the final one follows
        self.headers = [(header[1].lower(), header[2]) for header in headers if header is not None]
        self._frame(code, is_newer=status[1] == b"1")
        self.status = code
        return True

    def _frame(self, code: int, *, is_newer: bool) -> None:
        """Determine from the headers how the body is framed."""
        lengths = {value for name, value in self.headers if name == b"content-length"}
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if (
            codings not in ([], [b"chunked"])
            or len(lengths) + len(codings) > 1
            or not all(map(_LENGTH.fullmatch, lengths))
        ):
            raise UpstreamFailure("the response headers contradict each other about the body's length")
        options = b",".join(value for name, value in self.headers if name == b"connection").lower()
        self.reusable = is_newer and b"close" not in options
        if code in _NO_BODY:
            self._end()
        elif codings:
            self._step = self._size
        elif lengths:
            self._left = int(lengths.pop())
            self._step = self._content
        else:
            self.reusable = False
            self._step = self._until_end

    def _content(self, body: list[bytes]) -> bool:
        self._take(body)
        if not self._left:
            self._end()
        return not self._left

    def _size(self, _body: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        size = _SIZE.fullmatch(line)
        if size is None:
            raise UpstreamFailure("a chunk size in the response is not valid HTTP/1.1")
        self._left = int(size[1], 16)
        self._step = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, body: list[bytes]) -> bool:
        if self._left:
            self._take(body)
        if self._left or len(self._buffer) < 2:
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise UpstreamFailure("a chunk in the response is longer than its size")
        self._consume(2)
        self._step = self._size
        return True

    def _trailer(self, _body: list[bytes]) -> bool:
        line = self._line()
        if line:
            self._trailers += 1
            if self._trailers > _MAX_TRAILERS:
                raise UpstreamFailure(f"the response has more than {_MAX_TRAILERS} trailers")
        elif line is not None:
            self._end()
        return line is not None

    def _until_end(self, body: list[bytes]) -> bool:
        if self._buffer:
            body.append(bytes(self._buffer))
            self._buffer.clear()
        return False

    def _after(self, _body: list[bytes]) -> bool:
        if self._buffer:
            self.reusable = False  # unexpected data after the response
            self._buffer.clear()
        return False

    def _end(self) -> None:
        self.complete = True
        self._step = self._after

    def _take(self, body: list[bytes]) -> None:
        piece = bytes(self._buffer[: self._left])
        if piece:
            del self._buffer[: self._left]
            self._left -= len(piece)
            body.append(piece)

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._searched)
        if (end if end >= 0 else len(self._buffer)) > _MAX_LINE:
            raise UpstreamFailure(f"a line between chunks in the response is longer than {_MAX_LINE} bytes")
        if end < 0:
            self._searched = max(len(self._buffer) - 1, 0)
            return None
        line = bytes(self._buffer[:end])
        self._consume(end + 2)
        return line

    def _consume(self, size: int) -> None:
        del self._buffer[:size]
        self._searched = 0


def _single_chunk(data: bytes) -> bytes | None:
    """Return the content of `data` if it is exactly one chunk, the usual case in streams."""
    size = data[: data.find(b"\r\n")]
    if not 0 < len(size) <= 6 or not size.isalnum() or _SIZE.fullmatch(size) is None:
        return None
    length, start = int(size, 16), len(size) + 2
    is_all = length and len(data) == start + length + 2 and data.endswith(b"\r\n")
    return data[start : start + length] if is_all else None
