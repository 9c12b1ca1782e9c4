"""The tokenizer in a GGUF file splits texts as llama.cpp does, and the node serves the file."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, trainers

pytest.importorskip("gguf", reason="needs the [cloud] extra")
llama_cpp: Any = pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from forward_chunks import Chunk, compute
from gguf_edit import edited
from gguf_fuzz import Value
from real_model import SMOLLM2, needs_smollm2
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.loading import gguf_tokenizer
from updraft.cloud_engine.models.loading.gguf_tokenizer import load_tokenizer
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.embedded import pocket
from updraft.protocol.errors import ModelLoadError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.text.tokenizer import Tokenizer
from vocabularies import put, spm

SOURCE = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. " * 3
TEXTS = [
    *("Hello world", "  two  spaces\n\nand\ttabs", "12345 3.14 1234567", "", " ", "\n", "\r\n \r\n", "x  ", " y"),
    *(
        "don't we'll I'M THEY'RE",
        "café naïve 日本語 Ελληνικά Ǆ",
        "🙂👍🏽",
        "１２３ ½ ٣٤",
        "e\u0301 \u00a0nbsp\u3000wide",
    ),
    *(
        "def f(x):\n    return x**2  # ok\n",
        "CamelCase HTTPServer's",
        "a/b//c\n/d",
        "$<=>^~|+",
        "fox sleeps dog",
        SOURCE,
    ),
    *("x <|im_end|> y", "<s> is text </s>"),
]


def random_texts() -> Iterator[str]:
    chance = random.Random(0)
    ranges = (range(32, 127), range(160, 0x300), range(0x3041, 0x3097), range(0x1F300, 0x1F600), range(9, 14))
    for _ in range(100):
        yield "".join(chr(chance.choice(chance.choice(ranges))) for _ in range(40))


def check_as_llama_cpp(path: Path, texts: Iterable[str]) -> None:
    ours, theirs = load_tokenizer(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        for text in texts:
            expected = theirs.tokenize(text.encode(), add_bos=False, special=False) if text else []
            assert ours.encode(text) == expected, text
        for token_id in range(theirs.n_vocab()):
            own = ours.token_bytes(token_id)  # llama-cpp-python reads at most 32 bytes
            assert own == theirs.detokenize([token_id]) or token_id in ours.special_ids or len(own) > 32
    finally:
        theirs.close()


@pytest.mark.parametrize("pre", list(gguf_tokenizer._SPLITS))
def test_byte_level_texts_are_split_as_by_llama_cpp(tmp_path: Path, pre: str) -> None:
    path = edited(pocket.pocket_small_gguf(), tmp_path / "model.gguf", {"tokenizer.ggml.pre": pre})
    texts = [*TEXTS, *random_texts()]
    if "qwen" in pre:  # Qwen's own tokenizer composes characters, which llama.cpp leaves out
        texts = [unicodedata.normalize("NFC", text) for text in texts]
        assert load_tokenizer(path).encode("e\u0301") == load_tokenizer(path).encode("é")
    check_as_llama_cpp(path, texts)


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_texts_are_split_as_by_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.train_from_iterator(
        [SOURCE.replace(" ", "▁")] * 5, trainers.BpeTrainer(vocab_size=250, show_progress=False)
    )
    pieces = [text.encode() for text, _ in sorted(trained.get_vocab().items(), key=lambda entry: entry[1])]

    def merged(tokens: list[bytes], kinds: list[int]) -> None:
        fillers = [at for at, token in enumerate(tokens) if "▁zz".encode() in token]
        for at, piece in zip(fillers, (piece for piece in pieces if piece not in tokens), strict=False):
            tokens[at] = piece

    file = spm(pocket.pocket_small_gguf().read_bytes(), merged)
    put(file, "add_bos_token", None)
    put(file, "add_space_prefix", Value(7, bytes([prefix])))
    path = tmp_path / "model.gguf"
    path.write_bytes(file.build())
    check_as_llama_cpp(path, [*TEXTS, *random_texts()])
    assert load_tokenizer(path).encode_prompt("fox")[0] == 1, "BOS by default"


def test_the_file_has_what_the_folder_has() -> None:
    file, folder = load_tokenizer(pocket.pocket_small_gguf()), Tokenizer.from_folder(pocket.pocket_small_folder())
    messages = [Message("system", "Be brief."), Message("user", "What is 2 + 3?")]
    assert file.encode_chat(messages) == folder.encode_chat(messages)
    assert file.encode_prompt("a b") == folder.encode_prompt("a b")
    assert file.vocabulary() == folder.vocabulary()
    assert folder.eos_ids <= file.eos_ids
    assert file.special_ids == folder.special_ids


def test_the_engine_serves_a_file() -> None:
    config = EngineConfig(threads=1, max_model_len=128, num_gpu_blocks_override=16)
    engine = Engine.from_folder(pocket.pocket_small_gguf(), config=config)
    ids = engine.tokenizer.encode_chat([Message("user", "What is 2 + 3?")])
    engine.add_request(GenerationRequest("a", ids, SamplingParams(temperature=0.0, max_tokens=40)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert "5" in engine.tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("pre", "unheard-of", "texts are split by 'unheard-of'"),
        ("model", "bert", "tokenizers of the kind 'bert'"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path, name: str, value: str, fault: str) -> None:
    path = edited(pocket.pocket_small_gguf(), tmp_path / "model.gguf", {f"tokenizer.ggml.{name}": value})
    with pytest.raises(ModelLoadError, match=fault):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokens", "token_type", "merges"])
def test_an_incomplete_tokenizer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = edited(pocket.pocket_small_gguf(), tmp_path / "model.gguf", {}, drop=[f"tokenizer.ggml.{name}"])
    with pytest.raises(ModelLoadError, match=f"ggml.{name}"):
        load_tokenizer(path)


@needs_smollm2
def test_a_real_model_has_the_log_probabilities_of_llama_cpp() -> None:
    """On average: llama.cpp also rounds activations, to eight bits."""
    ids = load_tokenizer(SMOLLM2).encode(Path(__file__).read_text(encoding="utf-8"))[:240]
    ours = compute(Runner(load_model(SMOLLM2), 15, 16), [Chunk(ids, 0, list(range(15)), len(ids))])
    theirs = llama_cpp.Llama(str(SMOLLM2), n_ctx=256, logits_all=True, verbose=False, n_threads=2)
    theirs.eval(ids)
    following = torch.tensor(ids[1:])[:, None]
    means = [
        logits[:-1].log_softmax(-1).gather(1, following).mean()
        for logits in (ours, torch.from_numpy(np.array(theirs.scores[: len(ids)])))
    ]
    assert abs(means[0] - means[1]) < 0.03
