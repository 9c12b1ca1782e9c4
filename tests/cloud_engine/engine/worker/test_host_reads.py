"""A step waits for the device once for its tokens, and once for all log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from updraft.cloud_engine.engine.worker import worker
from updraft.cloud_engine.engine.worker.sampler import UnreadLogprobs
from updraft.kernels.runtime.transfer import HostCopy, to_device


@pytest.fixture
def reads(monkeypatch):
    """Every tensor that is read on the host."""
    read: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist

    def counted(self):
        read.append(self)
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    return read


@pytest.mark.parametrize(
    ("params", "most"), [({}, 1), ({"logprobs": 3}, 2), ({"logprobs": 0, "presence_penalty": 1.0}, 2)]
)
def test_a_step_is_read_as_often_as_it_says(params, most, reads, make_engine, make_prompts, ask):
    engine = make_engine()
    for request in ask(make_prompts(6), max_tokens=8, **params):
        engine.add_request(request)
    while engine.has_work:
        reads.clear()
        engine.step()
        assert len(reads) == most


def test_requests_get_the_log_probabilities_they_asked_for(make_engine, make_prompts, ask, run, draft, monkeypatch):
    """Looked up together, whatever the others asked for, verified drafts among them; a branch has its own."""
    prompts = make_prompts(5, seed=21)
    requests = [
        ask([prompt], max_tokens=6, n=1 + (number == 2), temperature=0.9, seed=number, **wanted)[0]
        for number, (prompt, wanted) in enumerate(
            zip(prompts, [{"logprobs": 2}, {}, {"logprobs": 0}, {"logprobs": 5}, {}], strict=True)
        )
    ]
    requests = [replace(request, request_id=f"r{number}") for number, request in enumerate(requests)]
    looked_up: list[int] = []

    def counted(logits, chosen, num_top):
        looked_up.append(len(logits))
        return UnreadLogprobs(logits, chosen, num_top)

    monkeypatch.setattr(worker, "UnreadLogprobs", counted)
    together = run(make_engine(draft=draft, draft_length="fixed"), requests)
    steps_with_more = sum(rows > 1 for rows in looked_up)
    assert steps_with_more > 0
    by_itself = [replace(request, n=1) for request in requests]
    other_branch = replace(by_itself[2], params=replace(by_itself[2].params, seed=3))  # whose seed is one more
    alone = [run(make_engine(), [request])[0] for request in (*by_itself[:3], other_branch, *by_itself[3:])]
    for result, other in zip(together, alone, strict=True):
        assert result.token_ids == other.token_ids
        assert [len(score.top) for score in result.logprobs] == [len(score.top) for score in other.logprobs]
        for score, expected in zip(result.logprobs, other.logprobs, strict=True):
            assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [token for token, _ in score.top] == [token for token, _ in expected.top]


def test_tensors_on_the_device_are_not_copied() -> None:
    values = torch.arange(6).view(2, 3)
    assert to_device(values, torch.device("cpu")) is values
    assert HostCopy(values).tolist() == [[0, 1, 2], [3, 4, 5]]
