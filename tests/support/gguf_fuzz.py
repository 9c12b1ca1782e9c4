"""A corpus of damaged and hostile GGUF files: seeded mutations of a valid file, of its bytes and of its fields."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NUMBERS = (0, 1, 2, 3, 7, 31, 33, 255, 256, 4095, 65_537, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1, -1)
FLOATS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e38, 1e-45)
TEXTS = (b"", b"\0", b"\xff\xfe", b"a" * 5000, b"{% for x in y %}", "🙂".encode(), b"<s>", b"%s%n" * 20)
ARCHITECTURES = (
    b"qwen2", b"qwen3", b"gemma", b"gemma3", b"phi3", b"mamba", b"rwkv6", b"bert", b"t5", b"falcon", b"gpt2", b"mpt",
    b"deepseek2", b"gpt-oss", b"lfm2", b"granitehybrid", b"clip", b"nonsense",
)  # fmt: skip


@dataclass
class Value:
    """One metadata value. `kind` is the type number of the GGUF format.

    For arrays: `items` are encoded values of type `item_kind`; `count` replaces the true length if it is not None.
    """

    kind: int
    payload: bytes = b""
    item_kind: int = 0
    items: list[bytes] = field(default_factory=list)
    count: int | None = None

    def build(self) -> bytes:
        if self.kind != ARRAY:
            return struct.pack("<I", self.kind) + self.payload
        count = len(self.items) if self.count is None else self.count
        return struct.pack("<IIQ", ARRAY, self.item_kind, count % 2**64) + b"".join(self.items)


@dataclass
class Entry:
    name: bytes
    shape: list[int]
    kind: int
    start: int

    def build(self) -> bytes:
        dimensions = b"".join(struct.pack("<Q", size % 2**64) for size in self.shape)
        head = text(self.name) + struct.pack("<I", len(self.shape)) + dimensions
        return head + struct.pack("<IQ", self.kind % 2**32, self.start % 2**64)


@dataclass
class File:
    """A parsed GGUF file. `build` serialises it without any checks, so that changed files may be invalid."""

    values: list[tuple[bytes, Value]]
    tensors: list[Entry]
    data: bytearray

    @staticmethod
    def parse(content: bytes) -> File:
        reader = _Reader(content)
        tensor_count, value_count = reader.number("Q", 8), reader.number("Q", 16)
        reader.at = 24
        values = [(reader.text(), reader.value()) for _ in range(value_count)]
        tensors = [reader.tensor() for _ in range(tensor_count)]
        return File(values, tensors, bytearray(content[-(-reader.at // 32) * 32 :]))

    def build(self, *, tensor_count: int | None = None, value_count: int | None = None) -> bytes:
        counts = (
            len(self.tensors) if tensor_count is None else tensor_count % 2**64,
            len(self.values) if value_count is None else value_count % 2**64,
        )
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
        head += b"".join(text(key) + value.build() for key, value in self.values)
        head += b"".join(tensor.build() for tensor in self.tensors)
        return head + b"\0" * (-len(head) % 32) + bytes(self.data)

    def put(self, key: bytes, value: Value) -> None:
        self.values = [(name, value if name == key else old) for name, old in self.values]


def corpus(sound: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield `count` mutations of the valid file `sound`, each with a name that says how to reproduce it."""
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        name, mutate = draw.choice(list(MUTATIONS.items()))
        yield f"{name}-{seed}-{number}", mutate(draw, sound)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def flip(draw: random.Random, sound: bytes) -> bytes:
    content = bytearray(sound)
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(draw.choice((600, len(content))))] = draw.randrange(256)
    return bytes(content)


def cut(draw: random.Random, sound: bytes) -> bytes:
    return sound[: draw.randrange(len(sound))]


def splice(draw: random.Random, sound: bytes) -> bytes:
    start, length = draw.randrange(len(sound) // 2), draw.randrange(1, 200)
    return sound[:start] + draw.choice((b"", draw.randbytes(length))) + sound[start + draw.randrange(200) :]


def counts(draw: random.Random, sound: bytes) -> bytes:
    file = File.parse(sound)
    near = draw.randint(-3, 3)
    if draw.random() < 0.5:
        return file.build(tensor_count=draw.choice((*NUMBERS, len(file.tensors) + near)))
    return file.build(value_count=draw.choice((*NUMBERS, len(file.values) + near)))


def scalar(draw: random.Random, sound: bytes) -> bytes:
    """Replace one to three numbers or strings by other values, mostly of the same type."""
    file = File.parse(sound)
    for _ in range(draw.randint(1, 3)):
        key, value = draw.choice([item for item in file.values if item[1].kind != ARRAY])
        same = draw.random() < 0.8
        file.put(key, random_value(draw, value.kind if same else draw.choice((*SCALARS, STRING))))
    return file.build()


def hyperparameter(draw: random.Random, sound: bytes) -> bytes:
    """Set one to three of llama.cpp's hyperparameters to other numbers, even if the file lacks them."""
    file = File.parse(sound)
    names = (
        "block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "rope.dimension_count", "feed_forward_length", "context_length", "expert_count",
        "expert_used_count", "attention.sliding_window", "vocab_size",
    )  # fmt: skip
    for name in draw.sample(names, draw.randint(1, 3)):
        key = b"llama." + name.encode()
        file.values = [(old, value) for old, value in file.values if old != key]
        number = draw.choice((*NUMBERS[:13], draw.randrange(1, 200)))
        file.values.append((key, Value(4, struct.pack("<I", number % 2**32))))
    return file.build()


def key(draw: random.Random, sound: bytes) -> bytes:
    file = File.parse(sound)
    index = draw.randrange(len(file.values))
    match draw.choice(("drop", "double", "rename", "shuffle")):
        case "drop":
            del file.values[index]
        case "double":
            file.values.append(file.values[index])
        case "rename":
            file.values[index] = (draw.choice(TEXTS), file.values[index][1])
        case _:
            draw.shuffle(file.values)
    return file.build()


def array(draw: random.Random, sound: bytes) -> bytes:
    """Change length, type or content of a random array, or replace a number by an array."""
    file = File.parse(sound)
    name, old = draw.choice([item for item in file.values if item[1].kind == ARRAY])
    items = list(old.items)
    match draw.choice(("shorter", "longer", "retyped", "claims", "nested", "texts", "same", "per layer", "numbers")):
        case "shorter":
            new = Value(ARRAY, item_kind=old.item_kind, items=items[: draw.randrange(len(items))])
        case "longer":
            new = Value(ARRAY, item_kind=old.item_kind, items=items + items[: draw.randrange(1, 50)])
        case "retyped":
            new = Value(ARRAY, item_kind=draw.choice((*SCALARS, STRING, ARRAY, 77)), items=items)
        case "claims":
            new = Value(ARRAY, item_kind=old.item_kind, items=items, count=draw.choice(NUMBERS))
        case "nested":
            new = Value(ARRAY, item_kind=ARRAY, items=[struct.pack("<IQ", ARRAY, 2**20)] * 2)
        case "texts":
            for _ in range(draw.randint(1, 40)):
                items[draw.randrange(len(items))] = text(draw.choice(TEXTS))
            new = Value(ARRAY, item_kind=STRING, items=items)
        case "same":
            new = Value(ARRAY, item_kind=old.item_kind, items=[items[0]] * len(items))
        case "per layer":
            names = ("attention.head_count", "attention.head_count_kv", "block_count", "rope.dimension_count")
            name = b"llama." + draw.choice(names).encode()
            numbers = [struct.pack("<I", draw.choice(NUMBERS[:8])) for _ in range(draw.choice((0, 1, 2, 3, 600)))]
            new = Value(ARRAY, item_kind=4, items=numbers)
        case _:
            numbers = [struct.pack("<i", draw.choice((-1, 0, 7, 99, 2**31 - 1))) for _ in items]
            new = Value(ARRAY, item_kind=5, items=numbers)
    file.put(name, new)
    return file.build()


def tensor(draw: random.Random, sound: bytes) -> bytes:
    file = File.parse(sound)
    index = draw.randrange(len(file.tensors))
    one = file.tensors[index]
    match draw.choice(("shape", "rank", "kind", "start", "name", "double", "drop", "swap")):
        case "shape":
            one.shape[draw.randrange(len(one.shape))] = draw.choice((*NUMBERS, 64, 128, 1024))
        case "rank":
            one.shape = draw.choice(([], one.shape * 3, one.shape[::-1], [*one.shape, 1], [1, *one.shape]))
        case "kind":
            one.kind = draw.choice((*range(45), 255, 2**31, 2**32 - 1))
        case "start":
            one.start = draw.choice((*NUMBERS, one.start + 32, one.start - 32, one.start + 1))
        case "name":
            one.name = draw.choice((*TEXTS, b"blk.99.attn_q.weight", b"output.weight"))
        case "double":
            file.tensors.append(one)
        case "drop":
            del file.tensors[index]
        case _:
            other = draw.choice(file.tensors)
            one.name, other.name = other.name, one.name
    return file.build()


def weights(draw: random.Random, sound: bytes) -> bytes:
    """Replace weights by NaN, zeros or random bytes."""
    file = File.parse(sound)
    start = draw.randrange(len(file.data) // 2)
    length = draw.randrange(1, len(file.data) - start)
    file.data[start : start + length] = draw.choice((b"\xff" * length, b"\0" * length, draw.randbytes(length)))
    return file.build()


def architecture(draw: random.Random, sound: bytes) -> bytes:
    """Rename the architecture, so that another model family's code reads the same weights."""
    file, name = File.parse(sound), draw.choice(ARCHITECTURES)
    file.put(b"general.architecture", Value(STRING, text(name)))
    file.values = [(key.replace(b"llama.", name + b".", 1), value) for key, value in file.values]
    return file.build()


def tokenizer(draw: random.Random, sound: bytes) -> bytes:
    file = File.parse(sound)
    kinds = (b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"no_vocab", b"")
    file.put(b"tokenizer.ggml.model", Value(STRING, text(draw.choice(kinds))))
    return file.build()


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    mutation.__name__: mutation
    for mutation in (
        flip, cut, splice, counts, scalar, hyperparameter, key, array, tensor, weights, architecture, tokenizer,
    )
}  # fmt: skip


def random_value(draw: random.Random, kind: int) -> Value:
    if kind == STRING:
        return Value(STRING, text(draw.choice(TEXTS)))
    code = SCALARS[kind]
    if code in "fd":
        return Value(kind, struct.pack("<" + code, draw.choice(FLOATS[:5] if code == "f" else FLOATS)))
    size = struct.calcsize("<" + code)
    return Value(kind, (draw.choice(NUMBERS) % 256**size).to_bytes(size, "little"))


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 24

    def number(self, code: str, at: int | None = None) -> int:
        start = self.at if at is None else at
        if at is None:
            self.at += struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.content, start)[0]

    def bytes(self, length: int) -> bytes:
        self.at += length
        return self.content[self.at - length : self.at]

    def text(self) -> bytes:
        return self.bytes(self.number("Q"))

    def payload(self, kind: int) -> bytes:
        return text(self.text()) if kind == STRING else self.bytes(struct.calcsize("<" + SCALARS[kind]))

    def value(self) -> Value:
        kind = self.number("I")
        if kind != ARRAY:
            return Value(kind, self.payload(kind))
        item_kind, count = self.number("I"), self.number("Q")
        return Value(ARRAY, item_kind=item_kind, items=[self.payload(item_kind) for _ in range(count)])

    def tensor(self) -> Entry:
        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        return Entry(name, shape, self.number("I"), self.number("Q"))
