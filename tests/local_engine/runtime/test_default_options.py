"""The engine's choices by the build of llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import pytest
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.llama.kernels import KernelsInUse
from updraft.local_engine.llama.library import llama
from updraft.local_engine.options import LocalOptions
from updraft.local_engine.runtime.context_layout import settled
from updraft.model_files.gguf_header import GgufTensor
from updraft.model_files.gguf_reader import read_header

LARGE = (GgufTensor("token_embd.weight", (4096, 32000), 8, 0, 0),)


@pytest.mark.parametrize(
    ("attention", "tensors", "ubatch", "expected"),
    [
        (True, LARGE, None, 128),
        (True, LARGE, 64, 64),
        (False, LARGE, None, None),
        (True, (), None, None),
    ],
    ids=["ours", "asked for", "llama.cpp's", "small"],
)
def test_steps_are_short_with_the_attention_kernel(monkeypatch, attention, tensors, ubatch, expected) -> None:
    monkeypatch.setattr(llama(), "kernels", KernelsInUse(("Q8_0",), attention))
    header = replace(read_header(pocket_small_gguf()), tensors=tensors)
    assert settled(header, LocalOptions(ubatch=ubatch)).ubatch == expected


@pytest.mark.parametrize(
    "options",
    [LocalOptions(kv_cache_type="q8_0"), LocalOptions(kv_cache_type="f32"), LocalOptions(flash_attention=False)],
    ids=["q8_0", "f32", "no flash attention"],
)
def test_steps_are_llama_cpps_where_its_attention_computes(monkeypatch, options: LocalOptions) -> None:
    monkeypatch.setattr(llama(), "kernels", KernelsInUse(("Q8_0",), True))
    header = replace(read_header(pocket_small_gguf()), tensors=LARGE)
    assert settled(header, options).ubatch is None


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"attention.key_length": 72, "attention.value_length": 72},
        {"attention.key_length": 512, "attention.value_length": 512},
        {"attention.key_length": 192, "attention.value_length": 128},
        {"attn_logit_softcapping": 50.0},
    ],
    ids=["odd heads", "long heads", "keys unlike values", "soft caps"],
)
def test_steps_keep_llama_cpps_length_without_the_attention_kernel(
    monkeypatch, hyperparameters: dict[str, object]
) -> None:
    monkeypatch.setattr(llama(), "kernels", KernelsInUse(("Q8_0",), True))
    header = replace(read_header(pocket_small_gguf()), tensors=LARGE)
    metadata = {f"{header.architecture}.{name}": value for name, value in hyperparameters.items()}
    assert settled(replace(header, metadata={**header.metadata, **metadata}), LocalOptions()).ubatch is None


def test_explicit_options_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(llama(), "kernels", KernelsInUse(("Q8_0",), True))
    header = replace(read_header(pocket_small_gguf()), tensors=LARGE)
    assert settled(header, LocalOptions()).repack is False
    assert settled(header, LocalOptions(repack=True)).repack is True
    monkeypatch.setattr(llama(), "kernels", KernelsInUse())
    assert settled(header, LocalOptions()).repack is True
