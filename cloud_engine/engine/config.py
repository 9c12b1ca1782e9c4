"""The settings of an engine, checked once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ...kernels.runtime.backend import AttentionChoice
from ...protocol.errors import ConfigurationError

Policy = Literal["fcfs", "priority", "shortest-prefill"]
DraftLength = Literal["adaptive", "fixed"]
Mode = Literal["latency", "balanced", "throughput"]


_MAX_INT32 = 2**31 - 1
_CHOICES = (
    ("policy", get_args(Policy)),
    ("draft_length", get_args(DraftLength)),
    ("attention_backend", get_args(AttentionChoice)),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    # Tokens of prompt and answer together. None: the model's, or as many as the pool holds.
    context_length: int | None = None
    # Tokens per KV block.
    block_size: int = 16
    # Blocks in the pool. None: the whole context for a full batch, within 1 GiB, or most of what a GPU has left.
    num_blocks: int | None = None
    # Requests per step.
    max_batch_size: int = 16
    # Tokens per step, drafts included.
    token_budget: int = 512
    # Most tokens of an answer whose request sets no `max_tokens`.
    default_max_tokens: int = 4096
    # Milliseconds of a step, by what is measured: prompts and drafts are cut to fit. None: by the budget alone.
    max_step_ms: int | None = None
    # Who goes first: see `scheduler.order_of`.
    policy: Policy = "fcfs"
    # Queued requests beyond those that batch and pool have room for. With more, OverloadedError.
    max_waiting: int = 256
    # Most tokens drafted per request and step.
    num_draft_tokens: int = 8
    # How many of these: as pays by what is measured, or always all.
    draft_length: DraftLength = "adaptive"
    # Also draft by looking up what followed the same tokens before.
    ngram: bool = False
    # Keep what was computed, for requests that begin alike.
    prefix_caching: bool = True
    # Where requests without a seed get theirs from.
    seed: int = 0
    # "cpu", "cuda" or "cuda:N".
    device: str = "cpu"
    # Of the weights.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Torch threads. None: torch's default.
    num_threads: int | None = None
    # The same tokens and log-probabilities, to the last bit, whatever else is in the batch (on a CPU, at some cost).
    batch_invariant: bool = False
    # Plain torch, C for CPUs, or Triton for CUDA. "auto": what is fastest where the model is.
    attention_backend: AttentionChoice = "auto"
    # Capture decoding and verification as CUDA graphs, where attention is Triton's.
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_size", "max_waiting", "num_draft_tokens", "default_max_tokens"):
            if not 1 <= getattr(self, name) <= _MAX_INT32:
                raise ConfigurationError(f"{name} must be 1 to {_MAX_INT32}, got {getattr(self, name)}.", param=name)
        for name, choices in _CHOICES:
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}.", param=name
                )
        if self.token_budget > _MAX_INT32:
            raise ConfigurationError(
                f"token_budget must be at most {_MAX_INT32}, got {self.token_budget}.", param="token_budget"
            )
        if self.token_budget < self.max_batch_size:
            raise ConfigurationError(
                f"token_budget ({self.token_budget}) must be at least max_batch_size ({self.max_batch_size}), "
                "or a full batch could not move by one token each.",
                param="token_budget",
            )
        for name in ("context_length", "num_blocks", "num_threads", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MAX_INT32:
                raise ConfigurationError(f"{name} must be 1 to {_MAX_INT32} or left out, got {value}.", param=name)


@dataclass(frozen=True, slots=True)
class ModeLimits:
    """Fields of `EngineConfig`. Within them the engine goes by what it measures: chunks by the time of a token, drafts
    by what they win.
    """

    max_batch_size: int
    token_budget: int
    max_step_ms: int
    num_draft_tokens: int


#: For the first token and an even stream, for tokens per second of all, and between: where nothing was measured.
MODES: dict[Mode, ModeLimits] = {
    "latency": ModeLimits(8, 256, 50, 8),
    "balanced": ModeLimits(16, 512, 200, 8),
    "throughput": ModeLimits(64, 2048, 1000, 4),
}


def settings_of(limits: ModeLimits, **given: int | None) -> dict[str, Any]:
    """Those limits, but for what is `given` itself."""
    return asdict(limits) | {name: value for name, value in given.items() if value is not None}


def usual_block_size(device: str) -> int:
    """Tokens of a KV block: larger ones suit the tiles of a GPU's attention."""
    return 16 if device == "cpu" else 64
