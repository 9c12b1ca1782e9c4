"""Our products and attention in llama.cpp's place: used where they can be, and never where they would be wrong."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFReader
from updraft.bench.local_shapes import Shape, q4_k_m, q8_0
from updraft.embedded.pocket import pocket_small_gguf
from updraft.kernels.runtime.native_library import NativeBuildError, load_from
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama import kernels as ggml
from updraft.local_engine.llama import product_check as products
from updraft.local_engine.llama.kernels import Served, worth_repacking
from updraft.local_engine.llama.library import LlamaModel, llama
from updraft.local_engine.llama.product_check import KINDS, Factors, Kind
from updraft.local_engine.machine.machine import this_machine
from updraft.model_files.gguf_header import GgufTensor
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import ConfigurationError

llama()  # has put them in place
needs_vnni = pytest.mark.skipif(
    sys.platform != "linux" or "avx512_vnni" not in this_machine().instruction_sets, reason="no AVX-512 VNNI"
)
DECODE = """
import ctypes, hashlib, sys
import numpy as np
from updraft.local_engine.llama import kernels as ggml
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama.library import llama
if "ours" in sys.argv[2:]:
    library = ggml.load_from(ggml.SOURCES)
    counted = [ctypes.c_int64.in_dll(library, f"updraft_{name}") for name in ("products", "attentions")]
else:
    counted = []
with LocalEngine.load(sys.argv[1], LocalOptions(kv_cache_type="f16")) as engine:
    before = [each.value for each in counted]
    np.save(sys.argv[2], engine.score([5, 6, 7, 8, 9, 10, 11] * 9))
    print(*(each.value - was for each, was in zip(counted, before)))
"""
SCORE = """
import hashlib, sys
from updraft.local_engine.engine import LocalEngine
with LocalEngine.load(sys.argv[1]) as engine:
    print(hashlib.sha256(engine.score([5, 6, 7, 8, 9, 10, 11] * 9).tobytes()).hexdigest())
"""
SMALL_STACK = """
import sys, threading
from updraft.local_engine.engine import LocalEngine, LocalOptions

threading.stack_size(2**18)
with LocalEngine.load(sys.argv[1], LocalOptions(threads=1)) as engine:  # its thread computes
    print(engine.score([5, 6, 7, 8, 9, 10, 11] * 9).shape)
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


def scores(path: Path, to: Path, whose: str) -> tuple[np.ndarray, list[int]]:
    """Logits, and how many products and attentions were ours, in a process of its own."""
    environment = {**os.environ, ggml.SWITCH: whose}
    command = [sys.executable, "-c", DECODE, str(path), str(to), whose]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return np.load(to), list(map(int, done.stdout.split()))


@needs_vnni
def test_llama_cpp_computes_with_ours_and_says_the_same(mixed: Path, tmp_path: Path) -> None:
    """As far as two roundings of activations to eight bits let it, which is what another order of sums comes to."""
    ours, (products, attentions) = scores(mixed, tmp_path / "ours.npy", "ours")
    theirs, _ = scores(mixed, tmp_path / "theirs.npy", "llama.cpp")
    matrices = {tensor.name for tensor in GGUFReader(mixed).tensors if tensor.tensor_type.name != "F32"}
    assert products >= len(matrices) - 1
    assert attentions >= 8
    assert not np.array_equal(ours, theirs)
    assert np.abs(ours - theirs).std() < 0.02 * theirs.std()


@needs_vnni
def test_tiny_models_keep_llama_cpps_own_bits(tmp_path: Path) -> None:
    def bits(whose: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", SCORE, str(pocket_small_gguf())],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, ggml.SWITCH: whose},
        ).stdout

    assert bits("ours") == bits("llama.cpp") != ""


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
    with LocalEngine.load(k_quants, LocalOptions(kv_cache_type="f32")) as engine:
        long, short = engine.score(list(range(5, 45))), engine.score(list(range(5, 12)))
    assert np.array_equal(long[: len(short)].view(np.int32), short.view(np.int32))


@needs_vnni
@pytest.mark.parametrize("model", ["mixed", "k_quants"])
def test_half_precision_and_flash_attention_know_no_company(model: str, mixed: Path, k_quants: Path) -> None:
    """The defaults of large models: llama.cpp's attention alone computes otherwise from 64 rows on."""
    with LocalEngine.load(mixed if model == "mixed" else k_quants, LocalOptions(kv_cache_type="f16")) as engine:
        long, short = engine.score(list(range(5, 130))), engine.score(list(range(5, 12)))
    assert np.array_equal(long[: len(short)].view(np.int32), short.view(np.int32))


@pytest.fixture
def libraries() -> Iterator[tuple[ctypes.CDLL, ctypes.CDLL]]:
    """Ours, which serve as installed again behind the test, and ggml's."""
    yield load_from(ggml.SOURCES), ctypes.CDLL(str(ggml.known_libraries() / "libggml-cpu.so"))
    ggml.install()


@needs_vnni
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_not_served_is_handed_on(libraries, kind: Kind) -> None:
    ours, library = libraries
    counted, factors = ctypes.c_int64.in_dll(ours, "updraft_products"), Factors.scrambled(library, kind, (16, 2, 8))
    ggml.serve(ours, [other for other in KINDS if other != kind])
    before, found = counted.value, factors.product(ours.updraft_sgemm)
    assert counted.value == before
    assert (found is None) == (kind.values == 256)
    ggml.serve(ours, [kind])
    assert factors.product(ours.updraft_sgemm) is not None
    assert counted.value == before + 1


@needs_vnni
def test_a_check_changes_nothing_for_those_who_compute(libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of one product must agree on whether it is ours."""
    ours, library = libraries
    counted = ctypes.c_int64.in_dll(ours, "updraft_products")
    factors = [Factors.scrambled(library, kind, (16, 2, 8)) for kind in KINDS]
    served, check = [], ggml.agrees

    def watched(*arguments) -> bool:
        agrees, before = check(*arguments), counted.value
        for each in factors:
            each.product(ours.updraft_sgemm)
        served.append(counted.value - before)
        return agrees

    monkeypatch.setattr(ggml, "agrees", watched)
    ggml.install()
    assert served == [len(KINDS)] * len(KINDS)


@needs_vnni
def test_other_results_are_not_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    agrees = ggml.agrees
    monkeypatch.setattr(ggml, "agrees", lambda *given: agrees(*given) and given[2].name != "Q5_0")
    monkeypatch.setattr(ggml.attention, "agrees", lambda *_: False)
    names = [kind.name for kind in KINDS]
    with caplog.at_level(logging.WARNING):
        rest = tuple(name for name in names if name != "Q5_0")
        assert ggml.install() == Served(rest, False, "ours have other results for Q5_0, attention")
    assert "Q5_0" in caplog.text
    monkeypatch.undo()
    assert ggml.install() == Served(tuple(names), True)


@pytest.mark.parametrize(
    ("kinds", "shape", "expected"),
    [((12, 14, 0), (256, 256), False), ((12, 20), (256, 256), True), ((12,), (256, 256, 8), True)],
    ids=["all ours", "IQ4_NL", "experts"],
)
def test_what_is_ours_is_not_repacked(kinds: tuple[int, ...], shape: tuple[int, ...], expected: bool) -> None:
    tensors = [GgufTensor(f"blk.{place}.weight", shape, kind, 0, 0) for place, kind in enumerate(kinds)]
    header = replace(read_header(pocket_small_gguf()), tensors=tuple(tensors))
    served = Served(tuple(kind.name for kind in KINDS), True)
    assert worth_repacking(header, served) is expected
    assert worth_repacking(header, Served())


@needs_vnni
def test_who_wants_llama_cpp_untouched_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ggml.SWITCH, "llama.cpp")
    assert ggml.install() == Served(reason="UPDRAFT_PRODUCTS says so")
    monkeypatch.setenv(ggml.SWITCH, "their")
    with pytest.raises(ConfigurationError, match=r"'their': set it to ours or llama\.cpp"):
        ggml.install()


@needs_vnni
def test_another_build_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its libraries would be mixed with those of the package."""
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(ggml, "load_from", None)
    assert "LLAMA_CPP_LIB_PATH" in ggml.install().reason


@needs_vnni
def test_tensors_with_other_fields_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_weights_type", lambda *_: 0)
    assert not ggml.install().types
    monkeypatch.undo()
    assert ggml.install().types


@needs_vnni
def test_another_layout_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "known_libraries", lambda: tmp_path)
    monkeypatch.setattr(ggml, "load_from", None)
    assert ggml.install() == Served(reason="this build of llama.cpp has no libggml-cpu.so")


@pytest.mark.parametrize(("stated", "told"), [("__version__ = '99.0'", "99.0"), ("", "of unknown version")])
def test_unknown_versions_are_left_alone(tmp_path: Path, monkeypatch, caplog, stated: str, told: str) -> None:
    (tmp_path / "__init__.py").write_text(f"from .llama import *\n{stated}\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with caplog.at_level(logging.INFO):
        assert f"llama-cpp-python {told} is not one that is known" in ggml.install().reason
    assert told in caplog.text


@needs_vnni
def test_where_llama_cpp_may_be_computing_nothing_is_put_in_its_place() -> None:
    code = "import updraft, llama_cpp; from updraft.local_engine.llama.library import llama; print(llama().products)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "types=(), attention=False, reason='llama.cpp was loaded before" in done.stdout
    assert "before anything else" in done.stdout


@needs_vnni
def test_without_a_compiler_llama_cpp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ctypes.CDLL:
        raise NativeBuildError("there is none")

    monkeypatch.setattr(ggml, "load_from", fail)
    found = ggml.install()
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
