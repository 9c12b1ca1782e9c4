"""Formats of weights and cache, ranks, drafts and grammars together: every pair of settings occurs in one of the runs.

The reference is transformers with the dequantised weights, and with rounded keys and values if the cache is in FP8. It
reads each answer in one pass: the engine's token must be the best one that the grammar allows, within a tolerance.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from decoder_reference import reference_model
from gguf_writer import write_gguf
from quantized_checkpoints import KINDS, write_quantized
from rounded_attention import with_rounded_cache
from thread_group import ThreadGroup
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.ranks.follower import Follower
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import ServedModel, load_weights
from updraft.embedded import pocket
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.tokenizer import Tokenizer

FORMATS = {"plain": None, "fp8": "fp8-block", "int8": "int-channel", "int4": "awq-32", "gguf": "Q8_0"}
LEAST, MOST = 12, 20
GRAMMAR = Constraint("regex", f"[a-f ]{{{LEAST},{MOST}}}", "structured_outputs")
PROMPTS = [[5, 7, 9], list(range(20, 60)), [400, 3, 400, 3, 400, 3]]
#: Largest shortfall of a token's log-probability. A key between two FP8 numbers may be rounded to the other one.
TOLERANCE = {"auto": 1e-4, "fp8": 0.02}


class Run(NamedTuple):
    weights: str
    ranks: int
    cache: Any
    drafts: bool
    grammar: bool


RUNS = [
    Run("plain", 1, "auto", drafts=False, grammar=False),
    Run("plain", 2, "fp8", drafts=True, grammar=True),
    Run("fp8", 1, "fp8", drafts=False, grammar=True),
    Run("fp8", 2, "auto", drafts=True, grammar=False),
    Run("int8", 1, "auto", drafts=True, grammar=True),
    Run("int8", 2, "fp8", drafts=False, grammar=False),
    Run("int4", 1, "fp8", drafts=True, grammar=False),
    Run("int4", 2, "auto", drafts=False, grammar=True),
    Run("gguf", 1, "auto", drafts=True, grammar=True),
    Run("gguf", 2, "fp8", drafts=False, grammar=False),
]


def test_every_pair_of_settings_occurs() -> None:
    settings = (FORMATS, (1, 2), ("auto", "fp8"), (False, True), (False, True))
    for first, second in combinations(range(len(settings)), 2):
        assert {(run[first], run[second]) for run in RUNS} == set(product(settings[first], settings[second]))


class TellingGroup(ThreadGroup):
    """A rank on a thread, whose messages the ranks after it follow."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: list[queue.SimpleQueue[Any]] = []

    def tell(self, message: Any) -> None:
        for follower in self.told:
            follower.put(message)


def written(folder: Path, name: str) -> tuple[Path, Any]:
    """A checkpoint in a format, and the reference with its dequantised weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
    reference = reference_model("Llama", **sizes, vocab_size=1059, max_position_embeddings=448)
    kind = FORMATS[name]
    if kind is None:
        reference.save_pretrained(folder)
    elif name == "gguf":
        write_gguf(reference, folder / "model.gguf", kind)
        form = gguf.GGMLQuantizationType[kind]
        for weight in reference.parameters():
            if weight.dim() == 2:
                stored = gguf.quants.quantize(weight.detach().numpy(), form)
                weight.data = torch.from_numpy(gguf.quants.dequantize(stored, form))
        return folder / "model.gguf", reference
    else:
        write_quantized(reference, folder, KINDS[kind]())
    return folder, reference


@pytest.mark.parametrize("case", RUNS, ids=lambda case: "-".join(map(str, case)))
def test_each_token_is_the_best_allowed_one(tmp_path: Path, case: Run, run: Callable[..., Any]) -> None:
    path, reference = written(tmp_path, case.weights)
    if case.cache == "fp8":
        with_rounded_cache(reference)
    tokenizer = Tokenizer.from_folder(pocket.pocket_large_folder())
    config = EngineConfig(kv_cache_dtype=case.cache, tensor_parallel=case.ranks, ngram=case.drafts)
    leader, *others = TellingGroup.of(case.ranks)
    followers = [Follower(load_weights(path, config, group=group), config) for group in others]
    leader.told = [queue.SimpleQueue() for _ in others]
    threads = [
        threading.Thread(target=lambda told=told, each=each: [*map(each.follow, iter(told.get, None))], daemon=True)
        for told, each in zip(leader.told, followers, strict=True)
    ]
    for thread in threads:
        thread.start()
    served = ServedModel(load_weights(path, config, group=leader), tokenizer=tokenizer, eos_ids=tokenizer.eos_ids)
    constraint = GRAMMAR if case.grammar else None
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [
        GenerationRequest(str(at), ids, greedy, constraint=constraint, draft_ids=[7, 8, 9] * case.drafts)
        for at, ids in enumerate(PROMPTS)
    ]
    results = run(Engine(served, config), requests)
    leader.tell(None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.token_ids) > 5
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + result.token_ids]), use_cache=False).logits[0]
        for at, token in enumerate(result.token_ids):
            logprobs = logits[len(prompt) + at - 1].log_softmax(-1)
            if case.grammar:
                before = "".join(texts[each] for each in result.token_ids[:at])
                allowed = [each for each in range(len(texts)) if is_allowed(before, each, texts, tokenizer.eos_ids)]
                assert token in allowed
                logprobs = logprobs.index_fill(0, forbidden(allowed, len(logprobs)), float("-inf"))
            assert logprobs.max() - logprobs[token] < TOLERANCE[case.cache]


def forbidden(allowed: list[int], vocabulary: int) -> torch.Tensor:
    return torch.tensor(sorted(set(range(vocabulary)).difference(allowed)))


def is_allowed(before: str, token: int, texts: list[str], eos_ids: frozenset[int]) -> bool:
    if token in eos_ids:
        return len(before) >= LEAST
    text = texts[token]
    return bool(text) and set(text) <= set("abcdef ") and len(before + text) <= MOST
