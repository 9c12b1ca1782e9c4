"""Folders, shards and GGUF files become the same model; every fault in a file is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import reference_model
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ModelLoadError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference_model(num_key_value_heads=2, tie_word_embeddings=True).save_pretrained(path)
    return path


def test_bfloat16_weights_are_upcast_and_both_rope_notations_load(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bf16")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, tmp_path / "bf16" / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "bf16" / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    model = load_model(tmp_path / "bf16")
    assert model.config.rotary.inverse_frequencies[1] == pytest.approx(12345.0 ** (-1 / 8))
    assert load_model(folder).config.rotary.inverse_frequencies[1] == pytest.approx(10000.0 ** (-1 / 8))
    assert model.embed_tokens.weight.dtype is torch.float32
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"].float())
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_their_type_if_none_is_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    reference_model().to(dtype).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(tmp_path, dtype=None).parameters()} == {dtype}


def test_shards_load_like_one_file(folder: Path, tmp_path: Path) -> None:
    reference_model(num_key_value_heads=2, tie_word_embeddings=True).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    received: list[tuple[int, int]] = []
    model = load_model(tmp_path, progress=lambda done, total: received.append((done, total)))
    whole = load_model(folder).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    assert [done for done, _ in received] == sorted(done for done, _ in received)
    assert received[-1] == (sum(p.nbytes for p in model.parameters()),) * 2


def test_each_shard_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model().save_pretrained(tmp_path, max_shard_size="60KB")
    opened: list[str] = []
    real_open = Path.open

    def counting_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", counting_open)
    load_model(tmp_path)
    assert sorted(name for name in opened if name.endswith(".safetensors")) == sorted(
        path.name for path in tmp_path.glob("model-*.safetensors")
    )


@pytest.mark.parametrize("harm", ["unlink", "truncate", "outside"])
def test_damaged_shards_are_named(tmp_path: Path, harm: str) -> None:
    reference_model().save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    if harm == "outside":
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    else:
        shard.unlink() if harm == "unlink" else truncate(shard)
    with pytest.raises(ModelLoadError, match=shard.name.replace(".", r"\.")):
        load_model(tmp_path)


MEASURE = """
import re, sys
from pathlib import Path
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.kernels.runtime.host_memory import keep_freed_memory
from updraft.kernels.linear.onednn import OneDnnLinear

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

keep_freed_memory()  # as the engine's process does
Engine(ServedModel(load_model(Path(sys.argv[1]))), EngineConfig(num_gpu_blocks_override=16))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(Path(sys.argv[2]), dtype=torch.bfloat16)
weights = sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
loaded = (memory("VmHWM") - before) / weights
assert "sympy" not in sys.modules, "torch imports it for meta kernels, in half a second of each start"
engine = Engine(ServedModel(model), EngineConfig(num_gpu_blocks_override=16))
if isinstance(model.lm_head, OneDnnLinear) and model.config.tie_word_embeddings:
    weights += model.embed_tokens.weight.nbytes  # oneDNN's form cannot be looked up in: the plain one stays
print(loaded, (memory("VmHWM") - before) / weights)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux")
@pytest.mark.parametrize("tied", [False, True], ids=["head of its own", "tied head"])
@pytest.mark.parametrize(("stored", "most"), [("safetensors", 1.2), ("GGUF", 1.3)])  # intermediate results of decoding
def test_loading_and_packing_take_hardly_more_memory_than_the_weights(
    folder: Path, tmp_path: Path, stored: str, most: float, tied: bool
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 20_032}
    sizes["tie_word_embeddings"] = tied
    path = tmp_path if stored == "safetensors" else tmp_path / "model.gguf"
    if stored == "safetensors":
        reference_model(**sizes).save_pretrained(path, max_shard_size="50MB")
    else:
        write_gguf(reference_model(**sizes), path, "Q8_0")
        write_gguf(reference_model(), tmp_path / "small.gguf", "Q8_0")
    small = folder if stored == "safetensors" else tmp_path / "small.gguf"  # the memory of libraries is not counted
    script = [sys.executable, "-c", MEASURE, str(small), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / ".typing"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120, check=True)
    loaded, packed = map(float, done.stdout.split())
    assert 1.0 <= loaded <= most
    assert packed <= most + 0.02  # some panels of a matrix are there twice while it is packed


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, *, drop: str | None = None, **add: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    if drop is not None:
        del weights[drop]
    save_file({**weights, **add}, folder / "model.safetensors")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "no such folder": (shutil.rmtree, r"config\.json does not exist"),
    "config is not json": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "config lacks a size": (lambda f: edit_config(f, hidden_size=None), "hidden_size is missing"),
    "unknown architecture": (lambda f: edit_config(f, architectures=["FooLM"]), "'FooLM' is not supported; supported"),
    "unknown rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "spiral"}), "rope_type='spiral' is not"),
    "rope lacks": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "factor": 2.0}),
        "rope_type='yarn' needs the parameter 'original_max_position_embeddings'",
    ),
    "rope of words": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "factor": "two"}),
        "rope_type='linear' has a parameter of the wrong type",
    ),
    "rope type is a list": (lambda f: edit_config(f, rope_parameters={"rope_type": ["yarn"]}), "is not supported"),
    "rope theta of words": (lambda f: edit_config(f, rope_parameters={"rope_theta": "abc"}), "of the wrong type"),
    "rope theta is nothing": (
        lambda f: edit_config(f, rope_parameters={"rope_theta": 0.0}),
        "that are not finite and above 0",
    ),
    "rope factor is nothing": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "factor": 0.0}),
        "that are not finite and above 0",
    ),
    "yarn of theta 1": (
        lambda f: edit_config(
            f,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1.0,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "cannot be computed",
    ),
    "more rotated than there is": (
        lambda f: edit_config(f, rope_parameters={"partial_rotary_factor": 2.0}),
        "32 of 16 dimensions of a head",
    ),
    "no end to a head": (lambda f: edit_config(f, head_dim=2**45), "cannot rotate"),
    "no end to its layers": (lambda f: edit_config(f, num_hidden_layers=2**31), "2147483648 layers in config.json"),
    "rope factor without end": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "factor": float("inf")}),
        "that are not finite and above 0",
    ),
    "theta without end": (lambda f: edit_config(f, rope_theta=10**400), "must be a number"),
    "part is no number": (
        lambda f: edit_config(f, rope_parameters={"partial_rotary_factor": float("nan")}),
        "must be a number",
    ),
    "part of words": (lambda f: edit_config(f, rope_parameters={"partial_rotary_factor": "x"}), "must be a number"),
    "activation": (lambda f: edit_config(f, hidden_act="relu"), "hidden_act='relu'"),
    "size of words": (lambda f: edit_config(f, vocab_size="many"), "vocab_size must be a positive integer"),
    "bias without its tensors": (lambda f: edit_config(f, attention_bias=True), r"missing tensors: .*q_proj\.bias"),
    "heads do not divide": (lambda f: edit_config(f, num_key_value_heads=3), "not a multiple of 3 KV heads"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors"), "damaged"),
    "foreign weights": (lambda f: (f / "model.safetensors").write_bytes(b"GGUF" * 99), "damaged"),
    "header outside the file": (
        lambda f: (f / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}"),
        "damaged",
    ),
    "quantised weights": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
        r"model\.norm\.weight has the dtype I8; use F64, F32, F16, BF16",
    ),
    "missing tensor": (lambda f: edit_weights(f, drop="model.norm.weight"), r"missing tensors: model\.norm\.weight"),
    "unexpected tensor": (lambda f: edit_weights(f, extra=torch.ones(1)), "unexpected tensors: extra"),
    "wrong shape": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.ones(7)}),
        r"model\.norm\.weight \(7,\) has the wrong shape; the configuration needs \(64,\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_the_reason(folder: Path, tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    harm(broken)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(broken)
