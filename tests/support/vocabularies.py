"""Small model files with unusual or invalid vocabularies, made from the pocket model's tensors."""

from __future__ import annotations

import string
import struct
from collections.abc import Callable, Iterator

from gguf_fuzz import ARRAY, STRING, File, Value, text
from updraft.text.detokenize import gpt2_byte_alphabet

SIZE = 1024
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = b"tokenizer.ggml."


def numbers(code: str, values: list[float]) -> Value:
    kind = {"i": 5, "f": 6}[code]
    return Value(ARRAY, item_kind=kind, items=[struct.pack("<" + code, value) for value in values])


def texts(values: list[bytes]) -> Value:
    return Value(ARRAY, item_kind=STRING, items=[text(value) for value in values])


def put(file: File, name: str, value: Value | None) -> None:
    """Set the tokenizer's metadata `name` to `value`; None removes it."""
    key = _PREFIX + name.encode()
    file.values = [(old, content) for old, content in file.values if old != key]
    if value is not None:
        file.values.append((key, value))


def identifier(value: int) -> Value:
    return Value(4, struct.pack("<I", value))


def spm(sound: bytes, change: Callable[[list[bytes], list[int]], object] = lambda *_: None) -> File:
    """Return a file with a SentencePiece vocabulary: three special tokens, 256 bytes, some characters, and words."""
    file = File.parse(sound)
    tokens, kinds = [b"<unk>", b"<s>", b"</s>"], [UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds += [BYTE] * 256
    tokens += [c.encode() for c in "\u2581" + string.ascii_letters + string.digits + string.punctuation]
    tokens += [f"\u2581zz{number}".encode() for number in range(SIZE - len(tokens))]
    kinds += [NORMAL] * (SIZE - len(kinds))
    change(tokens, kinds)
    _fill(file, "llama", tokens, kinds)
    put(file, "scores", numbers("f", [-float(index) for index in range(SIZE)]))
    for name, value in (("unknown", 0), ("bos", 1), ("eos", 2)):
        put(file, f"{name}_token_id", identifier(value))
    put(file, "merges", None)
    put(file, "pre", None)
    return file


def bpe(sound: bytes, change: Callable[[list[bytes], list[int]], object] = lambda *_: None) -> File:
    """Return a file with a byte-level vocabulary: three special tokens, 256 bytes, and words."""
    file = File.parse(sound)
    tokens = [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>", *(c.encode() for c in gpt2_byte_alphabet())]
    tokens += [f"word{number}".encode() for number in range(SIZE - len(tokens))]
    kinds = [CONTROL] * 3 + [NORMAL] * (SIZE - 3)
    change(tokens, kinds)
    _fill(file, "gpt2", tokens, kinds)
    put(file, "merges", texts([b"w o", b"wo r", b"wor d", b"wo rd"]))
    return file


def rwkv(sound: bytes, change: Callable[[list[bytes], list[int]], object] = lambda *_: None) -> File:
    """Return a file with escaped tokens, as RWKV's converter writes them."""
    file = File.parse(sound)
    tokens = [b"<s>", *(repr(bytes((byte,)))[2:-1].encode() for byte in range(256))]
    tokens += [f"zz{number}".encode() for number in range(SIZE - len(tokens))]
    kinds = [CONTROL] + [NORMAL] * (SIZE - 1)
    change(tokens, kinds)
    _fill(file, "rwkv", tokens, kinds)
    put(file, "merges", None)
    return file


def _fill(file: File, model: str, tokens: list[bytes], kinds: list[int]) -> None:
    put(file, "model", Value(STRING, text(model.encode())))
    put(file, "tokens", texts(tokens))
    put(file, "token_type", numbers("i", list(kinds)))


def without(*names: bytes) -> Callable[[list[bytes], list[int]], object]:
    def change(tokens: list[bytes], kinds: list[int]) -> None:
        for name in names:
            index = tokens.index(name)
            tokens[index], kinds[index] = b"<pad%d>" % index, USER_DEFINED

    return change


def _all_of(kind: int) -> Callable[[list[bytes], list[int]], object]:
    def change(_: list[bytes], kinds: list[int]) -> None:
        kinds[:] = [kind] * len(kinds)

    return change


def with_holes(sound: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of files that lack or change something on which a tokenizer may rely."""
    yield "spm", spm(sound).build()
    yield "bpe", bpe(sound).build()
    yield "rwkv", rwkv(sound).build()
    for byte in (0x00, 0x0A, 0x41, 0x80, 0xC2, 0xE2, 0xF1, 0xF4, 0xFF):
        yield f"spm without {byte:02X}", spm(sound, without(b"<0x%02X>" % byte)).build()
        raw = {value: character.encode() for character, value in gpt2_byte_alphabet().items()}[byte]
        yield f"bpe without {byte:02X}", bpe(sound, without(raw)).build()
        yield f"rwkv without {byte:02X}", rwkv(sound, without(repr(bytes((byte,)))[2:-1].encode())).build()
    yield "spm without blanks", spm(sound, without("\u2581".encode())).build()
    for make in (spm, bpe, rwkv):
        for kind in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE, 77):
            yield f"{make.__name__}, every type {kind}", make(sound, _all_of(kind)).build()
        for name in ("bos", "eos", "unknown", "eot", "eom", "padding", "fim_pad"):
            for value in (None, identifier(SIZE), identifier(2**32 - 1), Value(STRING, text(b"two"))):
                file = make(sound)
                put(file, f"{name}_token_id", value)
                yield f"{make.__name__}, {name} {value}", file.build()
        for switch in ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"):
            file = make(sound)
            put(file, "bos_token_id", None)
            put(file, switch, Value(7, b"\1"))
            yield f"{make.__name__}, {switch}", file.build()
        for name in ("scores", "token_type", "merges", "pre"):
            file = make(sound)
            put(file, name, None)
            yield f"{make.__name__} without {name}", file.build()
        for item in (b"", b"\0", b"a\0b", b"\xff", b"<0xf1>", b"<0x", b"x" * 70_000, "\u2581".encode() * 300):
            file = make(sound, lambda tokens, _, item=item: tokens.__setitem__(500, item))
            yield f"{make.__name__} with {item[:8]!r}", file.build()
        for model in (
            b"llama",
            b"gpt2",
            b"bert",
            b"t5",
            b"rwkv",
            b"plamo2",
            b"gemma4",
            b"whitespace",
            b"hybriddna",
            b"test",
        ):
            file = make(sound)
            put(file, "model", Value(STRING, text(model)))
            yield f"{make.__name__} as {model.decode()}", file.build()
        twice = make(sound, lambda tokens, _: tokens.__setitem__(500, tokens[501]))
        yield f"{make.__name__} with a token twice", twice.build()
        nan = make(sound)
        put(nan, "scores", numbers("f", [float("nan")] * SIZE))
        yield f"{make.__name__} with scores of nan", nan.build()
    for merges in ([b"absent tokens"], [b""], [b" "], [b"a"], [b"a b c"], [b"w o"] * 3, [b"\xff \xfe"]):
        file = bpe(sound)
        put(file, "merges", texts(merges))
        yield f"bpe with merges {merges}", file.build()
    for pre in (b"", b"nonsense", b"default", b"falcon", b"deepseek-coder", b"gpt-4o", b"exaone-moe", b"kimi-k2"):
        file = bpe(sound)
        put(file, "pre", Value(STRING, text(pre)))
        yield f"bpe with pre {pre.decode()}", file.build()
    named = spm(sound)
    named.put(b"general.name", Value(STRING, text(b"Phi-3")))
    yield "spm, named Phi-3", named.build()
