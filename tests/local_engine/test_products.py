"""Our matrix products in llama.cpp's place: used where they can be, with the very bits of its own."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.bench.local_shapes import Shape, q4_k_m, q8_0
from updraft.embedded.pocket import pocket_small_gguf
from updraft.kernels.native_library import NativeBuildError, load_from
from updraft.local_engine import products
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama import LlamaModel, llama
from updraft.local_engine.machine import this_machine
from updraft.local_engine.products import Kind, Served

llama()  # has put them in place
needs_vnni = pytest.mark.skipif(
    sys.platform != "linux" or "avx512_vnni" not in this_machine().instruction_sets, reason="no AVX-512 VNNI"
)
DECODE = """
import ctypes, hashlib, sys
from updraft.local_engine import llama, products
from updraft.local_engine.engine import LocalEngine
if sys.argv[2] == "theirs":
    llama.install = products.Served
else:
    found, load = [], products.load_from
    products.load_from = lambda *arguments: found.append(load(*arguments)) or found[0]
served = lambda: ctypes.c_int64.in_dll(found[0], "updraft_products").value if sys.argv[2] == "ours" else 0
with LocalEngine.load(sys.argv[1]) as engine:
    before = served()
    bits = hashlib.sha256(engine.score([5, 6, 7, 8, 9, 10, 11] * 9).tobytes()).hexdigest()
    print(bits, served() - before)
"""
SMALL_STACK = """
import sys, threading
from updraft.local_engine.engine import LocalEngine, LocalOptions

threading.stack_size(2**18)
with LocalEngine.load(sys.argv[1], LocalOptions(threads=1, repack=False)) as engine:  # its thread computes
    print(engine.score([5, 6, 7, 8, 9, 10, 11] * 9).shape)
"""
ALONE = """
import ctypes
from updraft.kernels.native_library import load_from
from updraft.local_engine import products
ours = load_from(products._SOURCES, ctypes.RTLD_GLOBAL)
ggml = ctypes.CDLL(str(products.known_libraries() / "libggml-cpu.so"))
print(all(products.product(ours.llamafile_sgemm, ggml, kind, (8, 2, 4)) is None for kind in products.KINDS))
ours.ggml_compute_forward_mul_mat_tiled.restype = ctypes.c_bool
print(ours.ggml_compute_forward_mul_mat_tiled(None, None))
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the types that a Q4_K_M file of this width has: Q5_0 and Q8_0, and Q6_K and Q4_K where 256 fit."""
    folder = tmp_path_factory.mktemp("mixed")
    shape = Shape(layers=8, width=320, kv=1, feed_forward=512, vocabulary=1000, context=256)
    return q4_k_m(folder / "mixed.gguf", q8_0(folder / "source.gguf", shape), threads=2)


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is wide enough for K-quants throughout."""
    folder = tmp_path_factory.mktemp("k_quants")
    shape = Shape(layers=4, width=256, kv=1, feed_forward=512, vocabulary=1000, context=256)
    return q4_k_m(folder / "k.gguf", q8_0(folder / "source.gguf", shape), threads=2)


@needs_vnni
@pytest.mark.parametrize("model", ["pocket", "mixed"])
def test_llama_cpp_computes_with_ours_and_gives_the_same_bits(model: str, mixed: Path) -> None:
    """Those of its dot products: for many rows of K-quants it has another way, which can be turned off."""
    path = mixed if model == "mixed" else pocket_small_gguf()

    def run(whose: str) -> list[str]:
        command = [sys.executable, "-c", DECODE, str(path), whose]
        environment = {**os.environ, "GGML_CPU_TILED_MM": "0"} if whose == "theirs" else None
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.split()

    ours, theirs = run("ours"), run("theirs")
    types = ("Q8_0", "Q5_0", "Q6_K")  # not Q4_K, which is repacked
    matrices = {tensor.name for tensor in GGUFReader(path).tensors if tensor.tensor_type.name in types}
    assert int(ours[1]) >= len(matrices - {"token_embd.weight"}) > 0 == int(theirs[1])
    assert ours[0] == theirs[0]


@needs_vnni
@pytest.mark.parametrize("model", ["pocket", "mixed"])
def test_threads_with_small_stacks_can_compute(model: str, mixed: Path) -> None:
    path = mixed if model == "mixed" else pocket_small_gguf()
    done = subprocess.run([sys.executable, "-c", SMALL_STACK, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("(63, "), f"{done.returncode}: {done.stderr}"


def test_the_mixed_model_has_all_types(mixed: Path) -> None:
    assert {tensor.tensor_type.name for tensor in GGUFReader(mixed).tensors} == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


@needs_vnni
def test_an_answer_does_not_depend_on_the_rows_beside_it(k_quants: Path) -> None:
    """llama.cpp alone computes K-quants otherwise from eight rows on, and repacked ones from four."""
    with LocalEngine.load(k_quants, LocalOptions(kv_cache_type="f32", repack=False)) as engine:
        long, short = engine.score(list(range(5, 45))), engine.score(list(range(5, 12)))
    assert np.array_equal(long[: len(short)].view(np.int32), short.view(np.int32))


@pytest.fixture(scope="module")
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Ours, serving all types, and ggml's."""
    try:
        folder = products.known_libraries()
    except products.NotServedError as error:
        pytest.fail(f"add it to KNOWN_VERSIONS, or pin another: {error}")
    ours = load_from(products._SOURCES, ctypes.RTLD_GLOBAL)
    products.serve(ours, *products.KINDS)
    return ours, ctypes.CDLL(str(folder / "libggml-cpu.so"))


def same(libraries, kind: Kind, size: tuple[int, int, int], threads: int = 2) -> bool:
    ours, ggml = libraries
    found = products.product(ours.llamafile_sgemm, ggml, kind, size, threads)
    assert found is not None
    return np.array_equal(found.view(np.int32), products.dots(ggml, kind, size).view(np.int32))


@needs_vnni
@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(products.KINDS),
    rows=st.integers(1, 30),
    columns=st.integers(2, 40),
    blocks=st.integers(1, 40),
    threads=st.integers(1, 5),
)
def test_every_size_has_the_bits_of_ggml(libraries, kind: Kind, rows: int, columns: int, blocks: int, threads: int):
    assert same(libraries, kind, (rows, columns, blocks), threads)


@needs_vnni
@pytest.mark.parametrize("kind", products.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("size", [(4, 2, 90), (9, 600, 3), (8, 50, 90), (3, 9, 150)])
def test_what_does_not_fit_the_buffer_is_computed_in_parts(libraries, kind: Kind, size: tuple[int, int, int]) -> None:
    assert same(libraries, kind, size)


@needs_vnni
def test_the_longest_rows_are_left_to_ggml(libraries) -> None:
    ours, ggml = libraries
    by_name = {kind.name: kind for kind in products.KINDS}
    found = products.product(ours.llamafile_sgemm, ggml, by_name["Q6_K"], (2, 2, 700))
    assert found is None  # ggml multiplies row by row
    assert same(libraries, by_name["Q8_0"], (2, 2, 700))


@needs_vnni
@pytest.mark.parametrize("kind", products.KINDS, ids=lambda kind: kind.name)
def test_what_is_not_served_is_handed_on(libraries, kind: Kind) -> None:
    ours, ggml = libraries
    counted = ctypes.c_int64.in_dll(ours, "updraft_products")
    products.serve(ours, *(other for other in products.KINDS if other != kind))
    before, found = counted.value, products.product(ours.llamafile_sgemm, ggml, kind, (8, 2, 4))
    products.serve(ours, *products.KINDS)
    assert counted.value == before
    assert (found is None) == (kind.values == 256)


@needs_vnni
def test_one_row_is_left_to_ggml_but_of_q5_0(libraries) -> None:
    ours, ggml = libraries
    single = (products.product(ours.llamafile_sgemm, ggml, kind, (8, 1, 4)) for kind in products.KINDS)
    ones = [kind.name for kind, found in zip(products.KINDS, single, strict=True) if found is not None]
    assert ones == ["Q5_0"]
    assert all(same(libraries, products.KINDS[1], (rows, 1, 28)) for rows in (1, 6, 70))


@needs_vnni
def test_a_check_changes_nothing_for_those_who_compute(libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of one product must agree on whether it is ours."""
    ours, _ = libraries
    served, check = [], products._agrees

    def watched(*arguments) -> bool:
        agrees = check(*arguments)
        counted = ctypes.c_int64.in_dll(ours, "updraft_products")
        before = counted.value
        for kind in products.KINDS:
            assert same(libraries, kind, (8, 2, 4))
        served.append(counted.value - before)
        return agrees

    monkeypatch.setattr(products, "_agrees", watched)
    products.install()
    assert served == [len(products.KINDS)] * len(products.KINDS)


@needs_vnni
def test_other_bits_are_not_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    dots = products.dots
    monkeypatch.setattr(products, "dots", lambda ggml, kind, size: dots(ggml, kind, size) + (kind.name == "Q5_0"))
    with caplog.at_level(logging.WARNING):
        assert products.install() == Served(("Q8_0", "Q4_K", "Q6_K"), "with other bits than llama.cpp's: Q5_0")
    assert "Q5_0" in caplog.text
    monkeypatch.undo()
    assert products.install() == Served(tuple(kind.name for kind in products.KINDS))


@needs_vnni
def test_tensors_with_other_fields_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_weights_type", lambda *_: 0)
    assert not products.install().types
    monkeypatch.undo()
    assert products.install().types


@needs_vnni
def test_another_layout_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "known_libraries", lambda: tmp_path)
    monkeypatch.setattr(products, "load_from", None)
    assert products.install() == Served(reason="this build of llama.cpp has no libggml-cpu.so")


@needs_vnni
def test_nothing_is_handed_on_to_nobody() -> None:
    """Where ggml could not be opened after ours were loaded, which then stay before it."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_unknown_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0")
    with caplog.at_level(logging.INFO):
        assert "99.0" in products.install().reason
    assert "99.0" in caplog.text


@needs_vnni
def test_what_llama_cpp_has_bound_before_is_not_called_ours() -> None:
    code = "import updraft, llama_cpp; from updraft.local_engine.llama import llama; print(llama().products)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "types=(), reason='llama.cpp was loaded before" in done.stdout
    assert "before anything else" in done.stdout


@needs_vnni
def test_without_a_compiler_llama_cpp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ctypes.CDLL:
        raise NativeBuildError("there is none")

    monkeypatch.setattr(products, "load_from", fail)
    found = products.install()
    assert not found.types
    assert "there is none" in found.reason
    assert "gcc" in found.fix


def test_ends_and_controls_are_what_llama_cpp_says_of_each_token(tiny) -> None:
    model = LlamaModel(tiny.gguf)
    api, vocab, tokens = model._api, model._vocab, range(model.vocab_size)
    assert model.end_ids == {token for token in tokens if api.llama_vocab_is_eog(vocab, token)} != set()
    controls = {token for token in tokens if api.llama_vocab_is_control(vocab, token)}
    unknown = {token for token in tokens if api.llama_vocab_get_attr(vocab, token) & api.LLAMA_TOKEN_ATTR_UNKNOWN}
    assert set(model.control_tokens) == {api.llama_vocab_get_text(vocab, token).decode() for token in controls}
    assert model.special_ids == controls | unknown
    model.close()
