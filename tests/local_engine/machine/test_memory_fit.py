"""The estimate of a model's memory is what llama.cpp allocates, or a little more; what does not fit is refused."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from gguf_shapes import Shape, write
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalOptions
from updraft.local_engine.llama.library import llama
from updraft.local_engine.machine.memory_fit import KvCacheType, MemoryPlan, ensure_fits, estimate, largest_context
from updraft.local_engine.opening import plan_of
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import ModelTooLargeError

Q8_0, Q4_0, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "F16"))
MIB = 2**20
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}
SHAPES = {
    "wide": Shape(layers=2, width=512, heads=8, feed_forward=2048, kind=Q8_0),
    "large vocabulary": Shape(architecture="qwen2", vocabulary=60_000, kind=Q4_0, context=8192),
    "one kv head": Shape(layers=4, heads=8, kv_heads=1, head=128, width=1024, feed_forward=256),
    "long context": Shape(layers=2, context=32_768, kind=Q8_0),
    "windows": Shape(
        architecture="gemma3", layers=12, context=8192, extra={"attention.sliding_window": 512}, heads=4, kv_heads=1
    ),
}
PLANS = {
    "wide": [
        MemoryPlan(1000),
        MemoryPlan(4096, kv_cache_type="q8_0"),
        MemoryPlan(4096, kv_cache_type="f32", flash_attention=False),
    ],
    "large vocabulary": [
        MemoryPlan(4096),
        MemoryPlan(4096, ubatch=512, outputs=16),
        MemoryPlan(8192, ubatch=64),
        MemoryPlan(512, ubatch=512),
    ],
    "one kv head": [MemoryPlan(4096, kv_cache_type="q4_0"), MemoryPlan(2048, flash_attention=False, ubatch=512)],
    "long context": [MemoryPlan(32_768), MemoryPlan(32_768, flash_attention=False, ubatch=128)],
    "windows": [MemoryPlan(8192)],
}


@pytest.fixture(scope="module")
def shape_file(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("shapes"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write(folder / f"{name}.gguf", SHAPES[name])
        return made[name]

    return get


def allocated(path: Path, plan: MemoryPlan) -> dict[str, float]:
    """llama.cpp's own figures of its memory, in MiB by kind of buffer: KV, output, compute, mapped."""
    library = llama()
    api, lines = library.api, []
    callback = api.llama_log_callback(lambda _level, text, _data: lines.append(text.decode(errors="replace")))
    api.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        params = api.llama_model_default_params()
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = False
        model = api.llama_model_load_from_file(str(path).encode(), params)
        assert model, lines[-5:]
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = plan.context_length, plan.ubatch, plan.ubatch
        options.type_k = options.type_v = TYPES[plan.kv_cache_type]
        options.flash_attn_type, options.swa_full = int(plan.flash_attention), True
        options.n_seq_max, options.n_outputs_max = plan.sequences, plan.outputs or 0
        context = api.llama_init_from_model(model, options)
        assert context, lines[-5:]
        api.llama_free(context)
        api.llama_model_free(model)
    finally:
        api.llama_log_set(library.log_callback, ctypes.c_void_p(0))
    text = "".join(lines)
    sizes = dict.fromkeys(("KV", "output", "compute", "Mapped"), 0.0)
    for kind, size in re.findall(r"CPU[ _]*(KV|output|compute|Mapped model) buffer size =\s*([\d.]+) MiB", text):
        sizes[kind.partition(" ")[0]] += float(size)
    return sizes


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, plans in PLANS.items() for plan in plans])
def test_the_estimate_is_what_llama_cpp_allocates(shape_file, name, plan) -> None:
    path = shape_file(name)
    need, real = estimate(read_header(path), plan), allocated(path, plan)
    assert need.weights / MIB == pytest.approx(real["Mapped"], rel=0.02, abs=0.5)
    assert need.kv_cache / MIB == pytest.approx(real["KV"], rel=0.01)
    assert real["compute"] * 0.97 <= need.compute / MIB <= real["compute"] * 1.25 + 4


def test_the_pocket_model(tmp_path) -> None:
    plan = MemoryPlan(512, kv_cache_type="f32", flash_attention=False)
    need, real = estimate(read_header(pocket_small_gguf()), plan), allocated(pocket_small_gguf(), plan)
    assert need.kv_cache / MIB == pytest.approx(real["KV"], rel=0.01)
    assert need.total < 20 * MIB


def test_layers_that_differ(tmp_path) -> None:
    """KV heads by layer; a layer without any has the state of a recurrent one."""
    from updraft.model_files.gguf_header import GgufArray, GgufHeader

    metadata = {"general.architecture": "jamba", "jamba.block_count": 3, "jamba.embedding_length": 256}
    metadata |= {"jamba.attention.head_count": 4, "jamba.ssm.inner_size": 512, "jamba.ssm.state_size": 16}
    metadata |= {"jamba.ssm.conv_kernel": 4}
    arrays = {"jamba.attention.head_count_kv": GgufArray(4, 3, (0, 2, 0))}
    need = estimate(GgufHeader(metadata, arrays, (), 0, 0), MemoryPlan(1024, sequences=2))
    recurrent = 4 * (3 * 512 + 16 * 512) * 2
    assert need.kv_cache == 1024 * 2 * 128 * 2 + 2 * recurrent


def test_oversized_models_are_refused_with_figures(shape_file) -> None:
    header = read_header(shape_file("long context"))
    options = LocalOptions(max_model_len=32_768)
    plan = plan_of(header, options)
    need = estimate(header, plan)
    assert ensure_fits("long", header, plan, need.total) == need
    available = need.total - need.kv_cache // 2
    with pytest.raises(ModelTooLargeError, match=r"long needs .* MB .* 32,784 tokens in f32.* are free: ") as caught:
        ensure_fits("long", header, plan, available)
    assert (caught.value.needed, caught.value.available) == (need.total, available)
    smaller, quantized = map(int, re.findall(r"max_model_len=(\d+)", caught.value.message))
    assert "kv_cache_type='q8_0'" in caught.value.message

    def needed(tokens: int, kind: KvCacheType | None) -> int:
        """By the engine that is asked for so."""
        changed = replace(options, max_model_len=tokens, kv_cache_type=kind)
        return estimate(header, plan_of(header, changed)).total

    for tokens, kind in ((smaller, None), (quantized, "q8_0")):
        assert needed(tokens, kind) <= available
        assert tokens == 32_768 or needed(tokens + 256, kind) > available
    assert smaller < quantized


@pytest.mark.parametrize("share", [0.9, 0.5, 0.4])
def test_the_advice_is_good(share) -> None:
    """The proposal of a refusal is not refused, nor more than the model was trained on."""
    header = read_header(pocket_small_gguf())
    plan = plan_of(header, LocalOptions())
    available = int(estimate(header, plan).total * share)
    with pytest.raises(ModelTooLargeError) as caught:
        ensure_fits("pocket", header, plan, available)
    proposed = re.findall(
        r"max_model_len=(\d+)( and max_num_seqs=1)?( with kv_cache_type='q8_0')?", caught.value.message
    )
    assert proposed
    for tokens, alone, quantized in proposed:
        options = LocalOptions(
            max_model_len=int(tokens), max_num_seqs=1 if alone else None, kv_cache_type="q8_0" if quantized else None
        )
        assert int(tokens) <= 512
        assert estimate(header, plan_of(header, options)).total <= available


def test_weights_that_do_not_fit_leave_only_another_model(shape_file) -> None:
    header = read_header(shape_file("wide"))
    assert largest_context(header, MemoryPlan(4096), 2**20) == 0
    with pytest.raises(ModelTooLargeError, match="smaller or more strongly quantized model, or unload another"):
        ensure_fits("wide", header, MemoryPlan(4096), 2**20)
