"""Our matrix products in llama.cpp's place: used where they can be, with the very bits of its own."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.local_engine import products
from updraft.local_engine.llama import LlamaModel, llama
from updraft.local_engine.machine import this_machine

llama()  # has put them in place
needs_vnni = pytest.mark.skipif(
    sys.platform != "linux" or "avx512_vnni" not in this_machine().instruction_sets, reason="no AVX-512 VNNI"
)
DECODE = """
import ctypes, hashlib, sys
from updraft.local_engine import llama, products
from updraft.local_engine.engine import LocalEngine
if sys.argv[2] == "theirs":
    llama.install = lambda: False
else:
    found, load = [], products.load_from
    products.load_from = lambda *arguments: found.append(load(*arguments)) or found[0]
served = lambda: ctypes.c_int64.in_dll(found[0], "updraft_products").value if sys.argv[2] == "ours" else 0
with LocalEngine.load(sys.argv[1]) as engine:
    before = served()
    bits = hashlib.sha256(engine.score([5, 6, 7, 8, 9, 10, 11] * 9).tobytes()).hexdigest()
    print(bits, served() > before)
"""


@needs_vnni
def test_llama_cpp_computes_with_ours_and_gives_the_same_bits() -> None:
    from updraft.embedded.pocket import pocket_small_gguf

    def run(whose: str) -> list[str]:
        command = [sys.executable, "-c", DECODE, str(pocket_small_gguf()), whose]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    ours, theirs = run("ours"), run("theirs")
    assert (ours[1], theirs[1]) == ("True", "False")
    assert ours[0] == theirs[0]


@pytest.fixture(scope="module")
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Ours and ggml's."""
    from updraft.kernels.native_library import load_from

    folder = products._known_libraries()
    assert folder is not None, f"add {importlib.metadata.version('llama-cpp-python')} to KNOWN_VERSIONS, or pin another"
    ours = load_from(products._SOURCES, ctypes.RTLD_GLOBAL)
    return ours, ctypes.CDLL(str(folder / "libggml-cpu.so"))


@needs_vnni
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(2, 80), blocks=st.integers(1, 60), threads=st.integers(1, 5))
def test_every_size_has_the_bits_of_ggml(libraries, rows: int, columns: int, blocks: int, threads: int) -> None:
    ours, ggml = libraries
    found = products.product(ours, (rows, columns, blocks), threads)
    expected = products.product(ggml, (rows, columns, blocks), threads)
    assert found is not None and expected is not None
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))


@needs_vnni
@pytest.mark.parametrize("size", [(4, 2, 700), (9, 600, 3), (8, 30, 400)])
def test_what_does_not_fit_the_buffer_is_computed_in_parts_or_handed_on(libraries, size: tuple[int, int, int]) -> None:
    ours, ggml = libraries
    found, expected = products.product(ours, size), products.product(ggml, size)
    assert found is not None and expected is not None and np.array_equal(found, expected)


@needs_vnni
def test_one_row_is_left_to_ggml(libraries) -> None:
    assert products.product(libraries[0], (8, 1, 4)) is None


@needs_vnni
def test_other_bits_are_not_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(products, "_agree", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        assert not products.install()
    assert "other bits" in caplog.text
    monkeypatch.undo()
    assert products.install()


def test_unknown_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0")
    with caplog.at_level(logging.INFO):
        assert not products.install()
    if sys.platform == "linux":
        assert "99.0" in caplog.text


def test_ends_and_controls_are_what_llama_cpp_says_of_each_token(tiny) -> None:
    model = LlamaModel(tiny.gguf)
    api, vocab, tokens = model._api, model._vocab, range(model.vocab_size)
    assert model.end_ids == {token for token in tokens if api.llama_vocab_is_eog(vocab, token)} != set()
    controls = {token for token in tokens if api.llama_vocab_is_control(vocab, token)}
    unknown = {token for token in tokens if api.llama_vocab_get_attr(vocab, token) & api.LLAMA_TOKEN_ATTR_UNKNOWN}
    assert set(model.control_tokens) == {api.llama_vocab_get_text(vocab, token).decode() for token in controls}
    assert model.special_ids == controls | unknown
    model.close()
