"""Models in parts: the ranks of a group, as threads, compute the same logits as one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from decoder_reference import SHAPES, expected_logprobs, random_tokens, reference_model
from forward_chunks import Chunk, compute
from hypothesis import given
from hypothesis import strategies as st
from thread_group import ThreadGroup
from torch import Tensor
from updraft.cloud_engine.engine.worker import model_runner
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.models.sharding import ModelGroup, Shard
from updraft.protocol.errors import ConfigurationError

torch.set_num_threads(1)


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_compute_the_logits_of_one_model(tmp_path: Path, shape: str, size: int, num_stages: int) -> None:
    architecture, options = SHAPES[shape]
    reference = reference_model(architecture, **options)
    reference.save_pretrained(tmp_path)
    if architecture == "Olmo2" and size > 1:
        with pytest.raises(ConfigurationError, match="norms of Olmo2ForCausalLM extend over all heads"):
            load_model(tmp_path, group=ThreadGroup.of(size)[0])
        return
    tokens, table = random_tokens(60), [3, 1, 0, 2]

    @torch.inference_mode()
    def logits(group: ModelGroup) -> Tensor:
        runner = Runner(load_model(tmp_path, group=group), 4, 16)
        chunks = [(0, 40, 40), (40, 57, 17), (57, 58, 1), (58, 60, 2)]
        return torch.cat([compute(runner, [Chunk(tokens[a:b], a, table, wanted)]) for a, b, wanted in chunks])

    with ThreadPoolExecutor(size * num_stages) as ranks:
        results = list(ranks.map(logits, ThreadGroup.in_stages(size, num_stages)))[-size:]
    torch.testing.assert_close(results[0].log_softmax(-1), expected_logprobs(reference, tokens), atol=1e-4, rtol=0)
    for other in results[1:]:
        assert torch.equal(other, results[0]), "all ranks sample, so they need the same bits"


@pytest.mark.parametrize(("size", "num_stages"), [(1, 2), (2, 2), (1, 3)])
def test_stages_compute_large_batches_in_parts(
    tmp_path: Path, size: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_model(num_key_value_heads=2)
    reference.save_pretrained(tmp_path)
    first, second = random_tokens(37), random_tokens(30)
    chunks = [Chunk(first[:20], 0, [3, 1, 0], 20), Chunk(second, 0, [2, 4], 30), Chunk(first[20:], 20, [3, 1, 0], 17)]

    @torch.inference_mode()
    def logits(group: ModelGroup) -> Tensor:
        runner = Runner(load_model(tmp_path, group=group), 5, 16)
        return torch.cat([compute(runner, chunks[:2]), compute(runner, chunks[2:])])

    def results() -> list[Tensor]:
        with ThreadPoolExecutor(size * num_stages) as ranks:
            return list(ranks.map(logits, ThreadGroup.in_stages(size, num_stages)))[-size:]

    whole = results()
    monkeypatch.setattr(model_runner, "_PART_ROWS", 8)
    parts = results()
    expected = expected_logprobs(reference, first), expected_logprobs(reference, second)
    in_order = torch.cat((expected[0][:20], expected[1], expected[0][20:]))
    for one in (*whole, *parts):
        torch.testing.assert_close(one.log_softmax(-1), in_order, atol=1e-4, rtol=0)


def test_a_step_exchanges_two_sums_per_layer_one_for_embeddings_and_the_logits(tmp_path: Path) -> None:
    reference_model("Llama", num_key_value_heads=2).save_pretrained(tmp_path)
    layers, hidden, vocabulary, rows, wanted = 3, 64, 97, 7, 2
    groups = ThreadGroup.of(2)

    def sent_bytes(group: ThreadGroup) -> list[int]:
        runner = Runner(load_model(tmp_path, group=group), 4, 16)
        compute(runner, [Chunk([1] * rows, 0, [0], wanted)])
        return group.sent_bytes

    with ThreadPoolExecutor(2) as ranks:
        for sent in ranks.map(sent_bytes, groups):
            assert sent == [rows * hidden * 4] * (2 * layers + 1) + [wanted * -(-vocabulary // 2) * 4]


@given(st.integers(1, 40), st.integers(1, 9))
def test_shares_cover_all_units(units: int, size: int) -> None:
    shares = [group.share(units) for group in ThreadGroup.of(size)]
    assert {unit for share in shares for unit in share} == set(range(units))
    if units >= size:
        assert sum(map(len, shares)) == units


def test_a_part_has_its_share_of_each_section() -> None:
    whole = torch.arange(2 * (4 + 1 + 1) * 3).view(12, 3)
    for group, rows in zip(ThreadGroup.of(2), ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 8, 9, 10, 11]), strict=True):
        shard = Shard(0, (4, 1, 1), 2, group)
        assert torch.equal(shard.take(whole), whole[rows])
        assert shard.length == len(rows)
        assert torch.equal(shard.take(whole[:, 0]), whole[rows, 0])


def test_a_bias_of_outputs_that_are_summed_is_added_once() -> None:
    bias = torch.ones(5)
    taken = [Shard(1, (4,), group=group).take(bias) for group in ThreadGroup.of(2)]
    assert [part.sum().item() for part in taken] == [5, 0]


def test_stages_without_layers_are_refused(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="4 stages are too many for the 3 layers"):
        load_model(tmp_path, group=ThreadGroup.in_stages(1, 4)[0])


@pytest.mark.parametrize(
    ("size", "options", "named"),
    [
        (3, {"num_key_value_heads": 4}, "4 heads and 4 KV heads"),
        (4, {"num_key_value_heads": 4, "intermediate_size": 90}, "90 neurons"),
        (2, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_uneven_parts_are_refused(tmp_path: Path, size: int, options: dict[str, int], named: str) -> None:
    reference_model("Llama", **options).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{size} ranks cannot share {named}"):
        load_model(tmp_path, group=ThreadGroup.of(size)[0])
