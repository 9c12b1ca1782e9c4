"""Tokens to text while they arrive: characters only when complete, stop strings never."""

from __future__ import annotations

import codecs
from collections.abc import Callable


def gpt2_byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte value, as character -> byte (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class IncrementalDetokenizer:
    """Turns token ids into text, holding back the bytes of a character that is not complete yet.

    Whatever the pushes, their results plus `flush()` join to the decoding of all bytes at once (invalid bytes become
    U+FFFD). `token_bytes` gives the raw bytes of one token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *token_ids: int) -> str:
        """The text that these tokens complete; may be empty."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, usually nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Ends text before the first stop string to be completed, however the text is cut into pushes.

    Of two stop strings the one that ends first wins, and of two that end together the longer one: what a reader of
    single characters would see. Text that may still become a stop string is held back.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        # The stop string that was met.
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text safe to emit now, and whether a stop string was met (then nothing more will be emitted)."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held, self.matched = "", text[start:end]
            return text[:start], True
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The held-back text, at the end of generation: no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
