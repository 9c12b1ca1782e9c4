"""GGUF files of every family are the models they were made of, and llama.cpp agrees."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs the [cloud] extra")

from decoder_reference import EXPERT_SHAPES, LONG_ONLY, expected_logprobs, random_tokens, reference_model
from decoder_reference import SHAPES as ALL_SHAPES
from forward_chunks import Chunk, compute
from gguf_writer import write_gguf
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.loading.gguf_file import GgufFile, gguf_vocabulary
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.kernels.linear.ops import QuantizedEmbedding, QuantizedLinear
from updraft.protocol.errors import ModelLoadError

torch.set_num_threads(1)

OUTSIDE = {
    "smollm3",
    "olmo2",
    "mistral-window",
    "mistral-block-window",
    "qwen2-window",
    "llama-dynamic",
    "llama-biases",
}
GEMMA = {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32}
SHAPES = {
    # llama.cpp's format has no place for Mistral's and Qwen2's windows and dynamic scaling, and supposes of Gemma 3
    # which layers have a window and how scores are scaled.
    **{
        name: shape
        for name, shape in ALL_SHAPES.items()
        if name not in (*OUTSIDE, *EXPERT_SHAPES) and "gemma" not in name
    },
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window": 18}),
    "gemma3-wide": ("Gemma3", {**GEMMA, "sliding_window": 33, "final_logit_softcapping": 5.0}),
}
TABLE = [3, 1, 4, 0, 5, 2]


def ours(path: Path, tokens: list[int]) -> torch.Tensor:
    return compute(Runner(load_model(path), 6, 16), [Chunk(tokens, 0, TABLE, len(tokens))]).log_softmax(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path: Path, shape: str) -> None:
    architecture, options = SHAPES[shape]
    reference = reference_model(architecture, **options)
    write_gguf(reference, tmp_path / "model.gguf")
    tokens = random_tokens(90)
    expected = expected_logprobs(reference, tokens)
    torch.testing.assert_close(ours(tmp_path / "model.gguf", tokens), expected, atol=1e-4, rtol=0)


def test_the_norms_of_gemma_lose_nothing_to_the_one_that_llama_cpp_adds(tmp_path: Path) -> None:
    reference = reference_model("Gemma3", **GEMMA).bfloat16()
    reference.save_pretrained(tmp_path / "folder")
    write_gguf(reference, tmp_path / "model.gguf")
    from_gguf, from_folder = (load_model(tmp_path / name, dtype=torch.bfloat16) for name in ("model.gguf", "folder"))
    for name, parameter in from_folder.named_parameters():
        assert torch.equal(from_gguf.get_parameter(name), parameter), name


def test_longrope_factors_travel(tmp_path: Path) -> None:
    architecture, options = LONG_ONLY
    reference = reference_model(architecture, **options)
    write_gguf(reference, tmp_path / "model.gguf")
    tokens = random_tokens(90)
    expected = expected_logprobs(reference, tokens)
    torch.testing.assert_close(ours(tmp_path / "model.gguf", tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "llama-3.1", "qwen2", "qwen2-yarn", "qwen3", "gemma3", "phi3"])
def test_llama_cpp_computes_the_same_from_the_same_file(tmp_path: Path, shape: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs the [edge] extra")
    architecture, options = SHAPES[shape]
    if architecture == "Phi3":
        options = {**options, "sliding_window": None}  # llama.cpp does without
    write_gguf(reference_model(architecture, **options), tmp_path / "model.gguf")
    tokens = random_tokens(60)
    tolerance = 2e-2 if architecture == "Gemma3" else 2e-3  # llama.cpp looks GELU up in a table of halves
    theirs = llama_cpp_logprobs(tmp_path / "model.gguf", tokens)
    torch.testing.assert_close(ours(tmp_path / "model.gguf", tokens), theirs, atol=tolerance, rtol=0)


def llama_cpp_logprobs(path: Path, tokens: list[int]) -> torch.Tensor:
    from updraft.local_engine.llama.library import llama

    llama_cpp = llama().api
    model_params, params = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.type_k, params.type_v = 256, 1, 0, 0  # 0: F32 keys and values
    params.flash_attn_type = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, "llama.cpp refuses the file"
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (97,)).copy() for i in range(len(tokens))]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return torch.from_numpy(np.stack(rows)).log_softmax(-1)


def test_the_ramp_of_yarn_is_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options = SHAPES["qwen2-yarn"]
    betas = {"beta_fast": 8.0, "beta_slow": 0.25}
    options = {**options, "rope_parameters": {**options["rope_parameters"], **betas}}
    reference = reference_model(architecture, **options)
    write_gguf(reference, tmp_path / "model.gguf")
    say_of_arch(monkeypatch, **{f"rope.scaling.yarn_{key}": value for key, value in betas.items()})
    tokens = random_tokens(90)
    expected = expected_logprobs(reference, tokens)
    torch.testing.assert_close(ours(tmp_path / "model.gguf", tokens), expected, atol=1e-4, rtol=0)


HOSTILE = [
    {"rope.freq_base": "high"},
    {"rope.freq_base": [1.0, 2.0]},
    {"rope.dimension_count": "all"},
    {"rope.dimension_count": 2**31},
    {"attention.key_length": "long"},
    {"attention.key_length": 2**31},
    {"rope.scaling.type": ["yarn"]},
    {"block_count": 2**31},
    {"feed_forward_length": 2**40},
    {"attention.head_count": 0},
]


@pytest.mark.parametrize("keys", HOSTILE, ids=str)
def test_wrong_metadata_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """Before there is memory for what it says."""
    write_gguf(reference_model(), tmp_path / "model.gguf")
    say_of_arch(monkeypatch, **keys)
    with pytest.raises(ModelLoadError):
        load_model(tmp_path / "model.gguf")


def say_of_arch(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """Let files hold other values under these keys of their architecture."""
    read = GgufFile._parameter
    monkeypatch.setattr(GgufFile, "_parameter", lambda file, key: keys.get(key) if key in keys else read(file, key))


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantised_matrices_are_read_as_the_library_reads_them(tmp_path: Path, quantization: str) -> None:
    import gguf

    reference = reference_model(num_key_value_heads=2)
    write_gguf(reference, tmp_path / "model.gguf", quantization)
    matrix = reference.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    kind = gguf.GGMLQuantizationType[quantization]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind))
    loaded = weight_of(load_model(tmp_path / "model.gguf"), "layers.1.mlp.down_proj.weight")
    assert torch.equal(loaded, expected)


def weight_of(model: Any, name: str) -> torch.Tensor:
    """A parameter, or the dequantised weight of a packed layer."""
    module = model.get_submodule(name.rpartition(".")[0])
    module = module.head if isinstance(module, QuantizedEmbedding) else module
    return module.weight.dequantized() if isinstance(module, QuantizedLinear) else model.get_parameter(name)


@pytest.mark.parametrize("quantization", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_k_quants_are_read_as_llama_cpp_reads_them(tmp_path: Path, quantization: str) -> None:
    """llama.cpp quantises a file and writes it back to F32; both files must be the same model to us."""
    pytest.importorskip("llama_cpp", reason="needs the [edge] extra")
    reference = reference_model(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_key_value_heads=2)
    write_gguf(reference, tmp_path / "plain.gguf")
    convert(tmp_path / "plain.gguf", tmp_path / "quantised.gguf", f"LLAMA_FTYPE_MOSTLY_{quantization}")
    convert(tmp_path / "quantised.gguf", tmp_path / "back.gguf", "LLAMA_FTYPE_ALL_F32")
    quantised, back = load_model(tmp_path / "quantised.gguf"), load_model(tmp_path / "back.gguf")
    assert (tmp_path / "quantised.gguf").stat().st_size < (tmp_path / "plain.gguf").stat().st_size / 3
    assert isinstance(quantised.layers[0].attention.qkv_proj, QuantizedLinear)
    for name, parameter in back.named_parameters():
        torch.testing.assert_close(weight_of(quantised, name), parameter, atol=1e-6, rtol=1e-5)


def convert(source: Path, target: Path, file_type: str) -> None:
    from updraft.local_engine.llama.library import llama

    llama_cpp = llama().api
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = getattr(llama_cpp, file_type), True, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0


def damaged(path: Path, change: Any) -> Path:
    write_gguf(reference_model(), path)
    data = path.read_bytes()
    path.write_bytes(change(data))
    return path


def tensor_kind(data: bytes, kind: int) -> bytes:
    """Another data type for one matrix: it stands after the name and two dimensions."""
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:1000], "the header ends early"),
        (lambda data: data[:-2000], "the file is truncated"),
        (lambda data: b"", "the file has only 0 bytes"),
        (lambda data: b"junk" * 500, "it is not a GGUF file"),
        (lambda data: tensor_kind(data, 99), "99 is not a valid"),
        (lambda data: tensor_kind(data, 26), r"blk\.1\.ffn_up\.weight cannot be dequantised.*I32"),
        (lambda data: data.replace(b"llama", b"lomo1"), "architecture 'lomo1' is not supported; supported: llama"),
        (lambda data: data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_ux.weight"), "missing tensors: .*up_proj"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load_model(damaged(tmp_path / "model.gguf", change))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"Cannot open .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf")


def test_the_vocabulary_is_the_one_that_the_library_reads(tmp_path: Path) -> None:
    import gguf

    write_gguf(reference_model(), tmp_path / "model.gguf")
    tokens = gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert gguf_vocabulary(tmp_path / "model.gguf") == {token: token_id for token_id, token in enumerate(tokens)}
    path = damaged(tmp_path / "model.gguf", lambda data: data.replace(tokens[5].encode(), b"\xff" * len(tokens[5])))
    with pytest.raises(ModelLoadError, match="not UTF-8"):
        gguf_vocabulary(path)
