"""Incremental decoding of tokens to text: holds back incomplete characters and possible stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


def gpt2_byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to byte values (inverse of `bytes_to_unicode` in encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


class IncrementalDetokenizer:
    """Incremental decoder of token ids to text, which holds back the bytes of an incomplete character.

    The results of all pushes and `flush()` together equal the decoding of all bytes at once (invalid bytes become
    U+FFFD). `token_bytes` returns the raw bytes of a token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *token_ids: int) -> str:
        """Return the text completed by these tokens; may be empty."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """Return the remaining text at the end of the answer: U+FFFD for an incomplete character, usually nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Incremental search for stop strings; the result does not depend on how the text is split into pushes.

    Of several matches, the match that ends first wins; of matches with the same end, the longest wins. Text that may
    still become a stop string is held back. As in vLLM, a match may begin in text that is pushed with `too_early`, but
    must end after this text.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        # Stop string that was found, if any.
        self.matched: str | None = None

    def push(self, text: str, *, too_early: bool = False) -> tuple[str, bool]:
        """Return the text safe to emit, and whether a stop string was found (later pushes then return no text)."""
        if self.matched is not None:
            return "", True
        num_searched, text = len(self._held), self._held + text
        starts = {stop: text.find(stop, max(0, num_searched + 1 - len(stop))) for stop in self._stop}
        matches = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        if matches and not too_early:
            end, start = min(matches)
            self._held, self.matched = "", text[start:end]
            return text[:start], True
        held = begun_mark(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """End the search: return the text that was held back."""
        text, self._held = self._held, ""
        return text


def begun_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that begins one of `marks`, but is shorter than the longest."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    lengths = range(longest, 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)
