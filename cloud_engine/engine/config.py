"""The engine's settings, validated at construction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ...kernels.runtime.backend import AttentionChoice, KVCacheDtype, Quantization
from ...protocol.errors import ConfigurationError

SchedulingPolicy = Literal["fcfs", "priority", "shortest-prefill", "fair"]
DraftLength = Literal["adaptive", "fixed"]
Mode = Literal["latency", "balanced", "throughput"]
WeightsDtype = Literal["auto", "float32", "bfloat16", "float16"]

#: Maximum draft tokens per step. Each needs a row of logits, which takes half a megabyte with a large vocabulary.
MAX_DRAFT_TOKENS = 2048
_MAX_INT32, _MAX_PORT = 2**31 - 1, 65535
_SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_speculative_tokens"),
    *("default_max_tokens", "tensor_parallel", "pipeline_parallel", "nnodes"),
)
_CHOICES = (
    ("scheduling_policy", get_args(SchedulingPolicy)),
    ("draft_length", get_args(DraftLength)),
    ("attention_backend", get_args(AttentionChoice)),
    ("dtype", get_args(WeightsDtype)),
    ("quantization", get_args(Quantization)),
    ("kv_cache_dtype", get_args(KVCacheDtype)),
)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How keys and values are stored and read (see `EngineConfig`)."""

    attention_backend: AttentionChoice = "auto"
    dtype: KVCacheDtype = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    # Maximum tokens of prompt and answer together. None: the model's context, or less if the KV cache is smaller.
    max_model_len: int | None = None
    # Tokens per KV block.
    block_size: int = 16
    # KV blocks. None: enough for a full batch at full context, but at most 1 GiB on a CPU.
    num_gpu_blocks_override: int | None = None
    # Share of a GPU's memory to use for weights, KV cache and a step's activations.
    gpu_memory_utilization: float = 0.92
    # Maximum requests per step.
    max_num_seqs: int = 16
    # Maximum tokens per step, drafts included.
    max_num_batched_tokens: int = 512
    # Maximum tokens of an answer if the request sets no `max_tokens`.
    default_max_tokens: int = 4096
    # Target time per step, in milliseconds; long prefills and drafts are chunked to fit. None: no target.
    max_step_ms: int | None = None
    # Order in which requests are served: see `scheduling.policies`.
    scheduling_policy: SchedulingPolicy = "fcfs"
    # Maximum queue length, not counting requests that fit into the next step. Further requests raise OverloadedError.
    max_waiting: int = 256
    # Maximum draft tokens per request and step.
    num_speculative_tokens: int = 8
    # Whether draft lengths adapt to measured times ("adaptive") or are always `num_speculative_tokens` ("fixed").
    draft_length: DraftLength = "adaptive"
    # Also draft by n-gram lookup: propose the tokens that followed the same n-gram earlier in the request's text.
    ngram: bool = False
    # Reuse the KV cache across requests that share a prefix.
    enable_prefix_caching: bool = True
    # "cpu", "cuda" or "cuda:N".
    device: str = "cpu"
    # Data type of weights and activations. "auto": the checkpoint's on a GPU, float32 on a CPU.
    dtype: WeightsDtype = "auto"
    # Format in which plain linear layers are quantized while the model is loaded. None: as in the checkpoint.
    quantization: Quantization | None = None
    # Data type of the KV cache: that of the weights ("auto"), or FP8 (E4M3), with half the bytes of bfloat16.
    kv_cache_dtype: KVCacheDtype = "auto"
    # Torch threads. None: torch's default.
    threads: int | None = None
    # Keep tokens and log-probabilities bit-identical whatever else is in the batch. CPU only, and slower.
    batch_invariant: bool = False
    # Attention kernels: plain torch, C for CPUs or Triton for CUDA. "auto": the fastest for the model's device.
    attention_backend: AttentionChoice = "auto"
    # Processes that share the model's layers, on as many GPUs or on this machine's CPU (tensor parallelism).
    tensor_parallel: int = 1
    # Stages of consecutive layers, each computed by `tensor_parallel` processes (pipeline parallelism).
    pipeline_parallel: int = 1
    # Ranks hold whole experts, instead of parts of all experts (expert parallelism).
    enable_expert_parallel: bool = False
    # Machines that share the model. Each runs an equal part of the processes, and machine 0 serves the requests.
    nnodes: int = 1
    # Number of this machine.
    node_rank: int = 0
    # Address and port of machine 0 for the other machines; the next port is used, too.
    master_addr: str = ""
    master_port: int = 29500
    # Do not capture decode and verification steps as CUDA graphs, which needs the attention backend Triton.
    enforce_eager: bool = False
    # File for a record of the latest 10,000 steps, without prompts or texts. None: no record.
    record_steps: str | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= _MAX_INT32:
                raise ConfigurationError(f"{name} must be 1 to {_MAX_INT32}, got {getattr(self, name)}.", param=name)
        for name, choices in _CHOICES:
            if getattr(self, name) not in (*choices, None):
                raise ConfigurationError(
                    f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}.", param=name
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}.",
                param="gpu_memory_utilization",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that each request of a full batch gets a token per step.",
                param="max_num_batched_tokens",
            )
        if self.num_ranks > 1 and self.batch_invariant:
            fault = "batch_invariant excludes tensor_parallel and pipeline_parallel: use one of them."
            raise ConfigurationError(fault, param="batch_invariant")
        if self.enable_expert_parallel and self.tensor_parallel == 1:
            fault = "enable_expert_parallel needs a tensor_parallel above 1, because these processes share the experts."
            raise ConfigurationError(fault, param="enable_expert_parallel")
        if self.num_ranks % self.nnodes or not 0 <= self.node_rank < self.nnodes:
            fault = f"{self.nnodes} machines need a node_rank below that, and equal shares of {self.num_ranks} ranks."
            raise ConfigurationError(fault, param="nnodes")
        if self.nnodes > 1 and not (self.master_addr and 1 <= self.master_port < _MAX_PORT):
            fault = f"Several machines need master_addr (of machine 0), and master_port from 1 to {_MAX_PORT - 1}."
            raise ConfigurationError(fault, param="master_addr")
        for name in ("max_model_len", "num_gpu_blocks_override", "threads", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MAX_INT32:
                raise ConfigurationError(f"{name} must be 1 to {_MAX_INT32} or left out, got {value}.", param=name)

    @property
    def cache(self) -> CacheOptions:
        return CacheOptions(self.attention_backend, self.kv_cache_dtype)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def own_ranks(self) -> range:
        """The ranks that run on this machine."""
        count = self.num_ranks // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True, slots=True)
class ModeLimits:
    """The values of `EngineConfig` fields that an engine mode sets. They are upper limits: within them, measured times
    determine the lengths of prompt chunks and drafts."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: int
    num_speculative_tokens: int


#: Default limits of each mode on a CPU, without measured step times (see `planning/mode_limits`).
MODES: dict[Mode, ModeLimits] = {
    "latency": ModeLimits(8, 256, 50, 8),
    "balanced": ModeLimits(16, 512, 200, 8),
    "throughput": ModeLimits(64, 2048, 1000, 4),
}
#: The same on a GPU.
GPU_MODES: dict[Mode, ModeLimits] = {
    "latency": ModeLimits(256, 2048, 50, 8),
    "balanced": ModeLimits(256, 8192, 200, 8),
    "throughput": ModeLimits(256, 8192, 1000, 4),
}


def usual_limits(mode: Mode, device: str) -> ModeLimits:
    """Return a mode's default limits on a device."""
    return MODES[mode] if device == "cpu" else GPU_MODES[mode]


def settings_of(limits: ModeLimits, **overrides: int | None) -> dict[str, Any]:
    """Return `limits` as arguments of `EngineConfig`. `overrides` that are not None take precedence."""
    return asdict(limits) | {name: value for name, value in overrides.items() if value is not None}


def usual_block_size(device: str) -> int:
    """Return the default number of tokens per KV block. Larger blocks on a GPU suit its attention kernels."""
    return 16 if device == "cpu" else 64
