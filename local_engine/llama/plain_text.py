"""Tokenization of user text, and checks of a GGUF file's tokenizer settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...model_files.gguf_header import GgufHeader
from ...model_files.gguf_reader import read_short_texts
from ...protocol.errors import ModelLoadError
from ...text.chat import special_pattern
from ...text.detokenize import gpt2_byte_alphabet
from .library import LlamaModel

_ENCODERS = ("bert", "t5")
_HEXADECIMAL_PRE = ("gemma4", "sarvam-moe")  # BPE tokenizers whose byte tokens are spelled <0xNN>
_LONGEST = 6  # bytes of the longest byte token, such as <0xF1>


class PlainTextTokenizer:
    """Tokenizes user text so that special `marks` in it are read as plain text.

    llama.cpp recognizes USER_DEFINED tokens anywhere in a text. Each mark is therefore cut in two, and the pieces are
    tokenized separately. The cut that gives the fewest tokens comes closest to a tokenizer that does not know the mark.
    """

    def __init__(self, model: LlamaModel, marks: Iterable[str]) -> None:
        self._model = model
        self._pattern = special_pattern(marks)
        self._cuts: dict[str, int] = {}

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`, without BOS and EOS."""
        ids: list[int] = []
        start = 0
        for match in () if self._pattern is None else self._pattern.finditer(text):
            end = match.start() + self._cut(match.group())
            ids += self._model.tokenize(text[start:end], allow_special=False)
            start = end
        return ids + self._model.tokenize(text[start:], allow_special=False)

    def _cut(self, mark: str) -> int:
        if mark not in self._cuts:
            self._cuts[mark] = min(
                range(1, len(mark)), key=lambda at: self._tokens(mark[:at]) + self._tokens(mark[at:])
            )
        return self._cuts[mark]

    def _tokens(self, text: str) -> int:
        return len(self._model.tokenize(text, allow_special=False))


def suspicious_settings(header: GgufHeader) -> Iterator[str]:
    """Yield warnings about tokenizer settings that are missing from the file."""
    advice = "Answers may be poor: convert the model again with a current llama.cpp, or download another file."
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        pre = header.metadata.get("tokenizer.ggml.pre")
        if pre in (None, "", "default"):
            yield f"tokenizer.ggml.pre is {pre or 'missing'}: text may be split differently than in training. {advice}"
    if "tokenizer.ggml.token_type" not in header.arrays:
        yield f"tokenizer.ggml.token_type is missing: special tokens cannot be distinguished from text. {advice}"


def missing_bytes(path: Path, header: GgufHeader) -> frozenset[int]:
    """Return the bytes that have no token in a BPE vocabulary. llama.cpp silently drops such bytes from texts.

    Raises ModelLoadError for an encoder's tokenizer, or a byte without token that would make llama.cpp crash or hang.
    """
    model, tokens = header.metadata.get("tokenizer.ggml.model"), header.arrays.get("tokenizer.ggml.tokens")
    if model in _ENCODERS:
        raise ModelLoadError(f"{path} has the tokenizer of an encoder ({model}), which cannot generate text.")
    spellings = _spellings(model, header.metadata.get("tokenizer.ggml.pre"))
    if tokens is None or spellings is None:
        return frozenset()
    short = read_short_texts(path, tokens, _LONGEST)
    missing = frozenset(byte for byte in range(256) if short.isdisjoint(spellings(byte)))
    if missing and model in ("llama", "rwkv"):
        raise ModelLoadError(
            f"The model file {path} cannot be used: its vocabulary has no token for the byte 0x{min(missing):02X}"
            f"{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}, and its tokenizer needs all 256. "
            "Download or export it again."
        )
    return missing


def _spellings(model: object, pre: object) -> Callable[[int], set[bytes]] | None:
    """Return a function from a byte to the possible texts of its token; None for a tokenizer without byte tokens."""
    if model == "llama":
        return lambda byte: {_hexadecimal(byte), *([bytes((byte,))] if 0 < byte < 128 else ())}
    if model == "rwkv":
        return _rwkv
    if model == "gemma4" or (model == "gpt2" and pre in _HEXADECIMAL_PRE):
        return lambda byte: {_hexadecimal(byte)}
    if model == "gpt2":
        characters = {byte: {character.encode()} for character, byte in gpt2_byte_alphabet().items()}
        return characters.__getitem__
    return None


def _hexadecimal(byte: int) -> bytes:
    return f"<0x{byte:02X}>".encode()


def _rwkv(byte: int) -> set[bytes]:
    """Return the byte itself and its backslash escapes. A backslash before t, n, r or x would mean another byte."""
    raw = bytes((byte,))
    escaped = {9: b"t", 10: b"n", 13: b"r"}.get(byte, raw if raw not in b"tnrx" else b"x%02x" % byte)
    return {b"\\x%02x" % byte, b"\\" + escaped, *([raw] if raw != b"\\" else ())}
