"""Byte tokens of a GGUF vocabulary. If one is missing, llama.cpp crashes or hangs on text that needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...model_files.gguf_header import GgufHeader
from ...model_files.gguf_reader import read_short_texts
from ...protocol.errors import ModelLoadError
from ...text.detokenize import gpt2_byte_alphabet

_ENCODERS = ("bert", "t5")
_HEXADECIMAL_PRE = ("gemma4", "sarvam-moe")  # BPE over raw UTF-8; llama.cpp writes other bytes as <0xNN>
_LONGEST = 6  # bytes in the spelling of a byte token, such as <0xF1>


def missing_bytes(path: Path, header: GgufHeader) -> frozenset[int]:
    """Return the bytes for which a BPE vocabulary has no token; llama.cpp drops such bytes from the text.

    Raises ModelLoadError if the tokenizer needs a token for every byte and one is missing, or for an encoder model.
    """
    model, tokens = header.metadata.get("tokenizer.ggml.model"), header.arrays.get("tokenizer.ggml.tokens")
    if model in _ENCODERS:
        raise ModelLoadError(f"{path} is an encoder model ({model}), which cannot generate text.")
    spellings = _spellings(model, header.metadata.get("tokenizer.ggml.pre"))
    if tokens is None or spellings is None:
        return frozenset()
    short = read_short_texts(path, tokens, _LONGEST)
    missing = frozenset(byte for byte in range(256) if short.isdisjoint(spellings(byte)))
    if missing and model in ("llama", "rwkv"):
        raise ModelLoadError(
            f"The model file {path} cannot be used: its vocabulary has no token for the byte 0x{min(missing):02X}"
            f"{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}, and its tokenizer needs all 256. "
            "Download or export the file again."
        )
    return missing


def _spellings(model: object, pre: object) -> Callable[[int], set[bytes]] | None:
    """Return the token texts that count as the byte token of a byte; None for a tokenizer without byte tokens."""
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
    """Return the byte itself and its escaped forms; a backslash before t, n, r and x escapes another byte."""
    raw = bytes((byte,))
    escaped = {9: b"t", 10: b"n", 13: b"r"}.get(byte, raw if raw not in b"tnrx" else b"x%02x" % byte)
    return {b"\\x%02x" % byte, b"\\" + escaped, *([raw] if raw != b"\\" else ())}
