"""Greedy answers of a small loaded model, and of its reference in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from decoder_reference import random_tokens
from forward_chunks import Chunk, compute
from torch import Tensor
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.models.sharding import ALONE, ModelGroup

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
TOKENS = random_tokens(40)
ANSWER = 12  # tokens


@torch.inference_mode()
def answered(folder: Path, group: ModelGroup = ALONE) -> tuple[Tensor, list[int]]:
    """Log-probabilities of `TOKENS` in two chunks, and the likeliest tokens that follow, one at a time."""
    runner, table = Runner(load_model(folder, group=group), 4, 16), [3, 1, 0, 2]
    chunks = [Chunk(TOKENS[:33], 0, table, 33), Chunk(TOKENS[33:], 33, table, len(TOKENS) - 33)]
    logits = torch.cat([compute(runner, [chunk]) for chunk in chunks])
    answer = [int(logits[-1].argmax())]
    while len(answer) < ANSWER:
        position = len(TOKENS) + len(answer) - 1
        answer.append(int(compute(runner, [Chunk(answer[-1:], position, table, 1)])[-1].argmax()))
    return logits.log_softmax(-1), answer


def likeliest(model: Any) -> list[int]:
    out = model.generate(torch.tensor([TOKENS]), max_new_tokens=ANSWER, do_sample=False)
    return out[0, len(TOKENS) :].tolist()
