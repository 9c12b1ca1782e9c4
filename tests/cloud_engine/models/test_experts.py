"""Routed experts: the routes of transformers' routers, ranks with whole experts, quantised experts, and refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import EXPERT_SHAPES, SHAPES, expected_logprobs, random_tokens, reference_model
from forward_chunks import Chunk, compute
from quantized_checkpoints import KINDS, edit_config, edit_tensors
from safetensors.torch import load_file, save_file
from thread_group import ThreadGroup
from torch import Tensor
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.config import ExpertsConfig
from updraft.cloud_engine.models.experts import route
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.models.sharding import ALONE, ModelGroup
from updraft.kernels.experts.ops import SeparateExperts
from updraft.kernels.experts.types import ExpertGroups
from updraft.kernels.linear.ops import QuantizedLinear
from updraft.protocol.errors import ConfigurationError, ModelLoadError

torch.set_num_threads(1)
TOKENS = random_tokens(40)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
QWEN = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@torch.inference_mode()
def logprobs(folder: Path, group: ModelGroup = ALONE, **options: Any) -> Tensor:
    """In one chunk, and then one token at a time."""
    runner, table = Runner(load_model(folder, group=group, **options), 4, 16), [3, 1, 0, 2]
    chunks = [Chunk(TOKENS[:33], 0, table, 33)]
    chunks += [Chunk(TOKENS[at : at + 1], at, table, 1) for at in range(33, len(TOKENS))]
    return torch.cat([compute(runner, [chunk]) for chunk in chunks]).log_softmax(-1)


def test_corrected_sigmoid_scores_in_groups_are_those_of_deepseek_v3() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    options = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "hidden_size": 32}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**options, routed_scaling_factor=2.5))
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.2)
    hidden = torch.randn(50, 32)
    _, weights, experts = router(hidden)
    config = ExpertsConfig(16, 4, 8, (True,), "sigmoid", scaling=2.5, groups=4, top_groups=2, has_correction=True)
    given = route(hidden @ router.weight.t(), config, router.e_score_correction_bias)
    order, expected_order = given.experts.argsort(1), experts.argsort(1)
    assert torch.equal(given.experts.gather(1, order), experts.gather(1, expected_order))
    torch.testing.assert_close(given.weights.gather(1, order), weights.gather(1, expected_order))


def test_softmax_of_the_best_logits_equals_renormalised_scores() -> None:
    torch.manual_seed(0)
    logits, config = torch.randn(30, 8), ExpertsConfig(8, 3, 8, (True,))
    best = logits.topk(3)
    routing = route(logits, config)
    assert torch.equal(routing.experts, best.indices)
    torch.testing.assert_close(routing.weights, best.values.softmax(-1))
    plain = route(logits, replace(config, renormalizes=False))
    torch.testing.assert_close(plain.weights, logits.softmax(-1).gather(1, best.indices))


@pytest.mark.parametrize("shape", EXPERT_SHAPES)
def test_ranks_with_whole_experts(tmp_path: Path, shape: str) -> None:
    architecture, options = SHAPES[shape]
    reference = reference_model(architecture, **options)
    reference.save_pretrained(tmp_path)
    groups = ThreadGroup.of(2)
    for group in groups:
        group.expert_parallel = True
    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(lambda group: logprobs(tmp_path, group), groups))
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], expected_logprobs(reference, TOKENS), atol=1e-4, rtol=0)
    sums = 2 * reference.config.num_hidden_layers + 1
    assert groups[0].sent_bytes[:sums] == [33 * 64 * 4] * sums, "a layer with experts needs one sum, like any other"


def test_a_decode_step_reads_only_the_experts_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options = SHAPES["qwen3-moe"]
    reference_model(architecture, **options).save_pretrained(tmp_path)
    runner, pairs = Runner(load_model(tmp_path), 4, 16), list[int]()
    forward = SeparateExperts.forward

    def counted(self: SeparateExperts, hidden: Tensor, groups: ExpertGroups, rows: Tensor | None = None) -> Tensor:
        pairs.append(len(groups.rows))
        return forward(self, hidden, groups, rows)

    monkeypatch.setattr(SeparateExperts, "forward", counted)
    compute(runner, [Chunk(TOKENS[:1], 0, [3], 1)])
    assert pairs == [3] * 4  # two products in each of two layers with experts, three experts per row


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    architecture, options = SHAPES["qwen2-moe"]
    reference_model(architecture, **options).save_pretrained(tmp_path)
    group = ThreadGroup.of(4)[0]
    group.expert_parallel = True
    with pytest.raises(ConfigurationError, match="4 ranks cannot share 6 experts"):
        load_model(tmp_path, group=group)
    edit_config(tmp_path, moe_intermediate_size=30)
    with pytest.raises(ConfigurationError, match="4 ranks cannot share 30 expert neurons"):
        load_model(tmp_path, group=ThreadGroup.of(4)[0])


def test_expert_parallelism_without_experts_is_refused(tmp_path: Path) -> None:
    reference_model("Llama").save_pretrained(tmp_path)
    group = ThreadGroup.of(2)[0]
    group.expert_parallel = True
    with pytest.raises(ConfigurationError, match="enable_expert_parallel: LlamaForCausalLM has no experts"):
        load_model(tmp_path, group=group)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["awq-32", "gptq-8", "gptq-4-order", "fp8-block", "int-channel", "pack-4-asymmetric"])
def test_quantised_checkpoints(tmp_path: Path, kind: str, size: int) -> None:
    model = quantised_model(tmp_path, kind)
    if size == 2 and kind.endswith("order"):
        with pytest.raises(ConfigurationError, match="would split quantization groups"):
            load_model(tmp_path, group=ThreadGroup.of(2)[0])
        return
    with ThreadPoolExecutor(size) as ranks:
        for result in ranks.map(lambda group: logprobs(tmp_path, group), ThreadGroup.of(size)):
            torch.testing.assert_close(result, expected_logprobs(model, TOKENS), atol=2e-4, rtol=0)


def quantised_model(folder: Path, kind: str) -> Any:
    """Write a model whose projections are quantised, and return it with the dequantised weights."""
    model, stored = reference_model("Qwen3Moe", **QWEN), KINDS[kind]()
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        quantised = stored.store(tensor)
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{leaf}": each.contiguous() for leaf, each in quantised.tensors.items()}
        put(model, layer, quantised.weight.float())
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=stored.config)
    return model


def put(model: Any, layer: str, weight: Tensor) -> None:
    """Give a transformers model the weight of one expert, or of a layer that all tokens use."""
    if ".experts." not in layer:
        model.get_submodule(layer).weight.data = weight
        return
    stacked, number, part = layer.rsplit(".", 2)
    experts = model.get_submodule(stacked)
    half = weight.shape[0]
    with torch.no_grad():
        match part:
            case "gate_proj":
                experts.gate_up_proj[int(number), :half] = weight
            case "up_proj":
                experts.gate_up_proj[int(number), half:] = weight
            case _:
                experts.down_proj[int(number)] = weight


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_experts_are_quantised_at_load(tmp_path: Path, method: Any) -> None:
    reference_model("Qwen3Moe", **QWEN).save_pretrained(tmp_path)
    model = load_model(tmp_path, quantization=method)
    names = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(names) == 2 * (2 + 2 * 4) + 1  # two layers of attention and experts, and the head
    assert not any("router" in name for name in names)
    logits = compute(Runner(model, 4, 16), [Chunk(TOKENS, 0, [3, 1, 0, 2], 40)])
    assert logits.isfinite().all()


@pytest.mark.parametrize("kind", ["gptq-4-order", "fp8-block"])
def test_other_devices_dequantise_experts(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = quantised_model(tmp_path, kind)
    caplog.set_level("INFO")
    result = logprobs(tmp_path, device="cpu:0")  # another device than "cpu" for the loader
    torch.testing.assert_close(result, expected_logprobs(model, TOKENS), atol=2e-4, rtol=0)
    assert "layers.0.mlp.expert_down: dequantized" in caplog.text


def test_experts_are_quantised_on_cpus_only(tmp_path: Path) -> None:
    reference_model("Qwen3Moe", **QWEN).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="experts of Qwen3MoeForCausalLM can be quantized on CPUs only"):
        load_model(tmp_path, quantization="int8", device="meta")


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and dequantised weight of a matrix (experts, outputs, inputs), by the OCP MX specification."""
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(min=-127)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - floats).abs().argmin(-1)
    values = floats[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), values.flatten(-2)


@pytest.mark.parametrize("size", [1, 2])
def test_mxfp4_as_gpt_oss_ships_it(tmp_path: Path, size: int) -> None:
    architecture, options = SHAPES["gpt-oss"]
    model = reference_model(architecture, **options)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{index}.mlp.experts.{part}"
            weight = getattr(layer.mlp.experts, part)
            blocks, scales, plain = mxfp4(weight.detach().transpose(1, 2))
            weight.data = plain.transpose(1, 2).contiguous()
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    with ThreadPoolExecutor(size) as ranks:
        for result in ranks.map(lambda group: logprobs(tmp_path, group), ThreadGroup.of(size)):
            torch.testing.assert_close(result, expected_logprobs(model, TOKENS), atol=1e-4, rtol=0)
    layer = load_model(tmp_path).layers[0].mlp.expert_down
    assert isinstance(layer, SeparateExperts) and isinstance(layer.layers[0], QuantizedLinear)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for cut, named in (
        ((slice(None), slice(1, None)), "an expert do not fit 64 inputs"),
        (slice(1, None), "4 experts"),
    ):
        edit_tensors(tmp_path, lambda tensors, cut=cut: tensors.update({name: tensors[name][cut].contiguous()}))
        with pytest.raises(ModelLoadError, match=f"experts.down_proj: .*{named}"):
            load_model(tmp_path)


@pytest.mark.parametrize(
    ("shape", "values", "named"),
    [
        ("qwen3-moe", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3-moe", {"num_local_experts": None}, "num_experts is missing"),
        ("qwen3-moe", {"num_local_experts": 9}, "missing tensors: .*experts.8"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not supported"),
        ("gpt-oss", {"num_local_experts": 5}, "has the wrong shape"),
        ("glm4-moe", {"n_group": 3}, "cannot be divided into 3 groups"),
        ("glm4-moe", {"num_experts_per_tok": 9}, "cannot use 9 of 8 experts in 2 groups"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    tmp_path: Path, shape: str, values: dict[str, Any], named: str
) -> None:
    architecture, options = SHAPES[shape]
    reference_model(architecture, **options).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelLoadError, match=named):
        load_model(tmp_path)
