"""Our kernels in llama.cpp: they serve where they were linked in, and llama.cpp runs as it is where they were not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from updraft.bench.local.shapes import Shape, q4_k_m, q8_0
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama import build, kernels, self_check
from updraft.local_engine.llama.kernels import SWITCH, KernelsInUse, check_switch, kernels_in_use, worth_repacking
from updraft.local_engine.llama.library import LlamaModel, llama
from updraft.local_engine.llama.product_check import KINDS, Factors
from updraft.local_engine.llama.self_check import wrong_kernels
from updraft.local_engine.machine.machine import this_machine
from updraft.model_files.gguf_header import GgufTensor
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.settings import environment

needs_kernels = pytest.mark.skipif(not llama().kernels.types, reason=llama().kernels.reason)
CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
NAMES = tuple(kind.name for kind in KINDS)
DECODE = """
import ctypes, sys
import numpy as np
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama.library import llama
library = llama().api._lib
counted = [ctypes.c_int64.in_dll(library, f"updraft_{name}") for name in ("products", "attentions")]
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


def scores(path: Path, to: Path, switch: str) -> tuple[np.ndarray, list[int]]:
    """Logits, and how many products and attentions were ours, in a process of its own."""
    environment = {**os.environ, SWITCH: switch}
    command = [sys.executable, "-c", DECODE, str(path), str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return np.load(to), list(map(int, done.stdout.split()))


@needs_kernels
def test_llama_cpp_gives_the_same_answers_with_the_kernels(mixed: Path, tmp_path: Path) -> None:
    """As far as two roundings of activations to eight bits let it, which is what another order of sums comes to."""
    ours, (products, attentions) = scores(mixed, tmp_path / "ours.npy", "on")
    theirs, none = scores(mixed, tmp_path / "theirs.npy", "off")
    matrices = {tensor.name for tensor in GGUFReader(mixed).tensors if tensor.tensor_type.name != "F32"}
    assert products >= len(matrices) - 1
    assert attentions >= 8
    assert none == [0, 0]
    assert not np.array_equal(ours, theirs)
    assert np.abs(ours - theirs).std() < 0.02 * theirs.std()


@needs_kernels
def test_tiny_models_keep_llama_cpps_own_bits(tmp_path: Path) -> None:
    def bits(switch: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", SCORE, str(pocket_small_gguf())],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, SWITCH: switch},
        ).stdout

    assert bits("on") == bits("off") != ""


@needs_kernels
@pytest.mark.parametrize("model", ["pocket", "mixed"])
def test_threads_with_small_stacks_can_compute(model: str, mixed: Path) -> None:
    path = mixed if model == "mixed" else pocket_small_gguf()
    done = subprocess.run([sys.executable, "-c", SMALL_STACK, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("(63, "), f"{done.returncode}: {done.stderr}"


def test_the_mixed_model_has_all_types(mixed: Path) -> None:
    assert {tensor.tensor_type.name for tensor in GGUFReader(mixed).tensors} == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


@needs_kernels
def test_an_answer_does_not_depend_on_the_rows_beside_it(k_quants: Path) -> None:
    """llama.cpp alone computes K-quants otherwise from eight rows on, and repacked ones from four."""
    with LocalEngine.load(k_quants, LocalOptions(kv_cache_type="f32")) as engine:
        long, short = engine.score(list(range(5, 45))), engine.score(list(range(5, 12)))
    assert np.array_equal(long[: len(short)].view(np.int32), short.view(np.int32))


@needs_kernels
@pytest.mark.parametrize("model", ["mixed", "k_quants"])
def test_half_precision_and_flash_attention_know_no_company(model: str, mixed: Path, k_quants: Path) -> None:
    """The defaults of large models: llama.cpp's attention alone computes otherwise from 64 rows on."""
    with LocalEngine.load(mixed if model == "mixed" else k_quants, LocalOptions(kv_cache_type="f16")) as engine:
        long, short = engine.score(list(range(5, 130))), engine.score(list(range(5, 12)))
    assert np.array_equal(long[: len(short)].view(np.int32), short.view(np.int32))


@needs_kernels
def test_all_kernels_serve_and_pass_their_own_check(ggml) -> None:
    assert llama().kernels == KernelsInUse(NAMES, True)
    assert wrong_kernels(ggml, llama().kernels) == ()


@needs_kernels
def test_wrong_kernels_are_named(ggml, monkeypatch: pytest.MonkeyPatch) -> None:
    agrees = self_check.agrees
    monkeypatch.setattr(self_check, "agrees", lambda library, kind: agrees(library, kind) and kind.name != "Q5_0")
    monkeypatch.setattr(self_check.attention_check, "agrees", lambda _: False)
    assert wrong_kernels(ggml, llama().kernels) == ("Q5_0", "attention")


@needs_kernels
def test_kernels_that_ggml_never_calls_are_named() -> None:
    """As where a later llama.cpp computes by other functions: here the switch keeps its calls from ours."""
    code = (
        "import ctypes; from updraft.local_engine.llama import self_check as check\n"
        "from updraft.local_engine.llama.kernels import KernelsInUse\n"
        "from updraft.local_engine.llama.library import llama\n"
        "check.agrees = lambda *_: True; check.attention_check.agrees = lambda *_: True\n"
        "print(check.wrong_kernels(ctypes.CDLL(llama().api._lib._name), KernelsInUse(('Q8_0', 'Q4_K'), True)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, SWITCH: "off"}
    )
    assert done.stdout.strip() == "('Q8_0', 'Q4_K', 'attention')"


@needs_kernels
def test_kernels_load_in_any_import_order() -> None:
    code = "import llama_cpp; from updraft.local_engine.llama.library import llama; print(llama().kernels.names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str((*NAMES, "attention"))


@needs_kernels
def test_a_product_of_another_type_is_declined(ggml) -> None:
    factors = Factors.scrambled(ggml, KINDS[2], (16, 2, 8))
    assert factors.product(ggml.updraft_product) is not None
    other = replace(factors, kind=replace(factors.kind, number=8, activation_type=0))  # float32 activations
    assert other.product(ggml.updraft_product) is None
    assert replace(factors, kind=replace(factors.kind, number=3)).product(ggml.updraft_product) is None  # Q4_1


@pytest.mark.parametrize(
    ("kinds", "shape", "expected"),
    [((12, 14, 0), (256, 256), False), ((12, 20), (256, 256), True), ((12,), (256, 256, 8), True)],
    ids=["all ours", "IQ4_NL", "experts"],
)
def test_types_with_a_kernel_are_not_repacked(kinds: tuple[int, ...], shape: tuple[int, ...], expected: bool) -> None:
    tensors = [GgufTensor(f"blk.{place}.weight", shape, kind, 0, 0) for place, kind in enumerate(kinds)]
    header = replace(read_header(pocket_small_gguf()), tensors=tuple(tensors))
    assert worth_repacking(header, KernelsInUse(NAMES, True)) is expected
    assert worth_repacking(header, KernelsInUse())


def test_the_switch_has_two_positions() -> None:
    for environ in ({}, {SWITCH: "on"}, {SWITCH: "off"}):
        check_switch(environ)
    with pytest.raises(ConfigurationError, match="'ours': set it to on or off"):
        check_switch({SWITCH: "ours"})
    assert environment({SWITCH: "off"}) == {}  # no misspelt setting of the router


@needs_kernels
def test_switched_off_they_compute_nothing() -> None:
    code = "from updraft.local_engine.llama.library import llama; print(llama().kernels)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, SWITCH: "off"}
    )
    assert done.stdout.strip() == str(KernelsInUse(reason=f"{SWITCH} is off"))


def test_a_llama_cpp_that_was_built_otherwise_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ctypes.CDLL(None)  # has no function of Updraft
    capable = replace(this_machine(), instruction_sets=("avx2", "avx512_vnni"))
    monkeypatch.setattr(kernels, "this_machine", lambda: capable)
    monkeypatch.setattr(kernels.platform, "system", lambda: "Linux")
    served = kernels_in_use(plain)
    assert served.names == ()
    assert "built without Updraft's kernels" in served.reason
    assert build.REBUILD_COMMAND in served.fix
    monkeypatch.setattr(kernels, "this_machine", lambda: replace(capable, instruction_sets=("avx2",)))
    assert kernels_in_use(plain) == KernelsInUse(reason="this processor has no AVX-512 VNNI")
    monkeypatch.setattr(kernels.platform, "system", lambda: "Darwin")
    assert kernels_in_use(plain) == KernelsInUse(reason="Updraft's kernels are for Linux")


def test_the_build_that_make_installs_has_them() -> None:
    if not build._installed_from(build.wheel_folder(build.pinned_version(CONSTRAINTS), os.environ)):
        pytest.skip("llama-cpp-python was not installed by make from this tree")
    if sys.platform != "linux" or "avx512_vnni" not in this_machine().instruction_sets:
        pytest.skip("no AVX-512 VNNI on Linux")
    assert llama().kernels.names == (*NAMES, "attention")


def test_ends_and_controls_are_what_llama_cpp_says_of_each_token(tiny) -> None:
    model = LlamaModel(tiny.gguf)
    api, vocab, tokens = model._api, model._vocab, range(model.vocab_size)
    assert model.end_ids == {token for token in tokens if api.llama_vocab_is_eog(vocab, token)} != set()
    controls = {token for token in tokens if api.llama_vocab_is_control(vocab, token)}
    unknown = {token for token in tokens if api.llama_vocab_get_attr(vocab, token) & api.LLAMA_TOKEN_ATTR_UNKNOWN}
    assert set(model.control_tokens) == {api.llama_vocab_get_text(vocab, token).decode() for token in controls}
    assert model.special_ids == controls | unknown
    model.close()
