"""What an operator may set on an engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...kernels.runtime.backend import AttentionChoice
from ...protocol.errors import ConfigurationError

Policy = Literal["fcfs", "priority", "shortest-prefill"]
DraftLength = Literal["adaptive", "fixed"]


_MOST = 2**31 - 1
_CHOICES = (
    ("policy", get_args(Policy)),
    ("draft_length", get_args(DraftLength)),
    ("attention_backend", get_args(AttentionChoice)),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine.

    `context_length`: tokens of prompt and answer together; None: the model's, or as many as the pool holds.
    `block_size`: tokens per KV block. `num_blocks`: blocks in the pool; None gives every sequence of a full batch the
    whole context, within 1 GiB, or most of what a GPU has left. `max_batch_size`: requests per step. `token_budget`:
    tokens per step, drafts included. `max_step_ms`: prompts and drafts are cut so that a step takes no longer, by what
    is measured; None: by the budget alone. `policy`: who goes first, see `scheduler.order_of`. `max_waiting`: queued
    requests, beyond those that batch and pool have room for, before OverloadedError, whatever their priority.
    `num_draft_tokens`: most tokens drafted per request and step. `draft_length`: how many of these, as pays by what is
    measured or always all. `ngram`: also draft by looking up what followed the same tokens before. `prefix_caching`:
    keep what was computed for requests that begin alike. `seed`: where requests without a seed of their own get theirs
    from. `num_threads`: torch threads, None for torch's default. `batch_invariant`: the same tokens, to the last bit of
    their log-probabilities, whatever else is in the batch and however a prompt is cut (on a CPU, at some cost).
    `attention_backend`: plain torch, C for CPUs, Triton for CUDA devices; "auto" takes what is fastest where the model
    is. `cuda_graphs`: capture decoding and verification at the start, where attention is Triton's.
    """

    context_length: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    max_batch_size: int = 16
    token_budget: int = 512
    max_step_ms: int | None = None
    policy: Policy = "fcfs"
    max_waiting: int = 256
    num_draft_tokens: int = 8
    draft_length: DraftLength = "adaptive"
    ngram: bool = False
    prefix_caching: bool = True
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: int | None = None
    batch_invariant: bool = False
    attention_backend: AttentionChoice = "auto"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_size", "max_waiting", "num_draft_tokens"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ConfigurationError(f"{name} must be 1 to {_MOST}, got {getattr(self, name)}.", param=name)
        for name, choices in _CHOICES:
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}.", param=name
                )
        if self.token_budget > _MOST:
            raise ConfigurationError(
                f"token_budget must be at most {_MOST}, got {self.token_budget}.", param="token_budget"
            )
        if self.token_budget < self.max_batch_size:
            raise ConfigurationError(
                f"token_budget ({self.token_budget}) must be at least max_batch_size ({self.max_batch_size}), "
                "or a full batch could not move by one token each.",
                param="token_budget",
            )
        for name in ("context_length", "num_blocks", "num_threads", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigurationError(f"{name} must be 1 to {_MOST} or left out, got {value}.", param=name)


def usual_block_size(device: str) -> int:
    """Tokens of a KV block: larger ones suit the tiles of a GPU's attention."""
    return 16 if device == "cpu" else 64
