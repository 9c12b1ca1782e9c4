"""Predicted decoding speed on a GPU, from its data sheet alone: an upper bound, not a measurement.

A decode step reads every weight and the keys and values of every sequence, and multiplies. The roofline model (Williams
et al. 2009) bounds both parts of the step by the slower of memory and tensor cores:

    weights:   max(weight bytes / bandwidth, 2 * weights * sequences / operations per second)
    attention: max(KV bytes / bandwidth, 4 * heads * head size * tokens of context / operations per second), per layer

Launches, sampling, activations and the host are not counted. A step reads the experts that any sequence uses, and each
sequence multiplies with its own; expected numbers assume that all experts are chosen equally often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.config import ModelConfig

#: Numbers of sequences, and their tokens of context, to predict.
BATCHES, CONTEXTS = (1, 64, 256), (1024, 8192)
_ELEMENT_BYTES = 2  # of bfloat16
_UTILIZATION = 0.92  # default share of memory to use


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Figures of a data sheet."""

    # Bytes of memory, and bytes per second.
    memory: float
    bandwidth: float
    # Dense bfloat16 operations per second. Data sheets of Hopper state operations with sparsity, twice as many.
    operations: float


#: GPUs by torch's name of the device. Source: NVIDIA's data sheets of the A100 and H100 (SXM, 80 GB) and the H200.
GPUS: Mapping[str, GpuSpec] = {
    "NVIDIA A100-SXM4-80GB": GpuSpec(80e9, 2.039e12, 312e12),
    "NVIDIA H100 80GB HBM3": GpuSpec(80e9, 3.35e12, 1979e12 / 2),
    "NVIDIA H200": GpuSpec(141e9, 4.8e12, 1979e12 / 2),
}


@dataclass(frozen=True, slots=True)
class DecodePrediction:
    """The predicted speed of decoding."""

    # Sequences that decode at a time: the batch, or as many as fit in memory.
    sequences: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.step_s


def predicted_decode(model: ModelConfig, gpu: GpuSpec, batch: int, context: int) -> DecodePrediction:
    """Predict the decoding of `batch` sequences with `context` tokens each, in bfloat16."""
    stored_weights = num_weights(model)
    kv_bytes = _ELEMENT_BYTES * 2 * model.num_kv_heads * model.head_dim * _visible_tokens(model, context)
    stored = _ELEMENT_BYTES * (stored_weights + model.vocab_size * model.hidden_size * (not model.tie_word_embeddings))
    sequences = max(1, min(batch, int((gpu.memory * _UTILIZATION - stored) / kv_bytes)))
    read, used = stored_weights - _unused(model, sequences), stored_weights - _unused(model, 1)
    products_s = max(_ELEMENT_BYTES * read / gpu.bandwidth, 2 * used * sequences / gpu.operations)
    pairs = 4 * model.num_heads * model.head_dim * _visible_tokens(model, context)
    attention_s = sequences * max(kv_bytes / gpu.bandwidth, pairs / gpu.operations)
    return DecodePrediction(sequences, products_s + attention_s)


def num_weights(model: ModelConfig) -> int:
    """Return the number of weights of the layers, with all experts, and of the output head, without norms."""
    neurons = model.num_layers * model.intermediate_size
    routed = 0
    if (experts := model.experts) is not None:
        sparse = sum(experts.layers)
        routed = sparse * (experts.count + experts.gates_shared)
        neurons += sparse * (experts.count * experts.intermediate_size + experts.shared_size - model.intermediate_size)
    return model.num_layers * _attention_weights(model) + (3 * neurons + routed + model.vocab_size) * model.hidden_size


def _attention_weights(model: ModelConfig) -> int:
    """Return the number of weights of one layer's attention."""
    size, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        return size * model.head_dim * 2 * (heads + model.num_kv_heads)
    queries = model.head_dim * heads
    down, up = size * (latent.rank + latent.rotated), heads * (model.head_dim - latent.rotated + latent.value_dim)
    of_queries = size * queries if latent.query_rank is None else latent.query_rank * (size + queries)
    return of_queries + down + latent.rank * up + heads * latent.value_dim * size


def _unused(model: ModelConfig, sequences: int) -> float:
    """Return the expected number of weights in experts that no token of `sequences` uses."""
    if (experts := model.experts) is None:
        return 0
    share = (1 - experts.top_k / experts.count) ** sequences
    return share * sum(experts.layers) * experts.count * 3 * experts.intermediate_size * model.hidden_size


def _visible_tokens(model: ModelConfig, context: int) -> int:
    """Return the tokens of context that the layers see, summed over the layers."""
    return sum(min(context, model.window(layer) or context) for layer in range(model.num_layers))
