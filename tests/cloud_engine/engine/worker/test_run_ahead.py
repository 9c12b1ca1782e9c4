"""Steps launched before the result of the one before them is read: the same answers, and little computed in vain.

On a CPU nothing is gained by it, so it is switched on here: everything else is as it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.cloud_engine.engine.speculation.draft_model import DraftModel
from updraft.cloud_engine.engine.worker import launched_step
from updraft.cloud_engine.engine.worker.launched_step import LaunchedStep
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.worker import Worker
from updraft.kernels.attention.ragged_batch import repeated
from updraft.kernels.runtime.transfer import HostCopy


@dataclass
class Device:
    """What a device that delays its results is asked to do, in order; reads of the sampled tokens are noted too."""

    events: list[str] = field(default_factory=list)

    @property
    def overlapped(self) -> list[bool]:
        """For each read, whether another step was launched before it."""
        launched = read = 0
        overlapped: list[bool] = []
        for event in self.events:
            launched += event == "launch"
            if event == "read":
                read += 1
                overlapped.append(launched > read)
        return overlapped


@pytest.fixture
def device(ahead, monkeypatch) -> Device:
    device = Device()
    forward, sample = Worker._forward, Worker.sample

    def noted_forward(self, *arguments):
        device.events.append("launch")
        return forward(self, *arguments)

    def noted_sample(self, *arguments):
        device.events.append("sample")
        sample(self, *arguments)

    class Delayed(HostCopy):
        def tolist(self):
            device.events.append("read")
            return super().tolist()

    monkeypatch.setattr(Worker, "_forward", noted_forward)
    monkeypatch.setattr(Worker, "sample", noted_sample)
    monkeypatch.setattr(launched_step, "HostCopy", Delayed)
    return device


def stepped(engine, requests, between=None):
    """All tokens by request, `between(engine, step)` called behind every step."""
    answers: dict[tuple[str, int], list[int]] = {
        (request.request_id, index): [] for request in requests for index in range(request.n)
    }
    for request in requests:
        engine.add_request(request)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id, output.index] += output.token_ids
        steps += 1
        if between is not None:
            between(engine, steps)
    assert engine.stats().kv_blocks_used == 0
    return answers, steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("block_size", [4, 16])
def test_answers_are_the_same(temperature, block_size, ahead, monkeypatch, make_engine, make_prompts, ask):
    """Over the borders of blocks; some end before the others, by their length, which costs nothing."""
    requests = [
        replace(request, params=replace(request.params, max_tokens=12 + 5 * number))
        for number, request in enumerate(ask(make_prompts(6, seed=2), temperature=temperature, seed=5, ignore_eos=True))
    ]
    launched, steps = stepped(engine := make_engine(block_size=block_size), requests)
    assert engine.stats().overlapped_steps == steps - 1 and engine.stats().vain_rows == 0
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert stepped(engine := make_engine(block_size=block_size), requests) == (launched, steps)
    assert engine.stats().overlapped_steps == 0


def test_a_stop_token_costs_one_row(ahead, monkeypatch, make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(8, seed=3), max_tokens=30)
    monkeypatch.setattr(Runner, "runs_ahead", False)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    ending = [
        replace(request, params=replace(request.params, stop_token_ids=(answer[7 + at],)))
        for at, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    expected = [answer[: answer.index(answer[7 + at])] for at, answer in enumerate(answers)]
    monkeypatch.setattr(Runner, "runs_ahead", True)
    outputs, steps = stepped(engine := make_engine(), ending)
    assert list(outputs.values()) == expected
    assert engine.stats().overlapped_steps >= steps - 2 and 0 < engine.stats().vain_rows <= 8


def test_predictions_are_verified_ahead(ahead, monkeypatch, make_engine, make_prompts, ask):
    """A prediction goes on where full acceptance would lead, and is right again a step after it went wrong."""
    requests = ask(make_prompts(6, seed=5), max_tokens=60, temperature=0.7, seed=2, ignore_eos=True)
    monkeypatch.setattr(Runner, "runs_ahead", False)
    answers, steps = stepped(make_engine(), requests)
    predicted = [
        replace(request, draft_ids=[token if at % 19 else (token + 1) % 97 for at, token in enumerate(answer)])
        for request, answer in zip(requests, answers.values(), strict=True)
    ]
    options = {"max_num_batched_tokens": 64, "draft_length": "fixed"}
    outputs, fewest = stepped(make_engine(**options), predicted)
    assert outputs == answers and fewest < 0.5 * steps
    monkeypatch.setattr(Runner, "runs_ahead", True)
    outputs, fewer = stepped(engine := make_engine(**options), predicted)
    assert outputs == answers and fewer < fewest + 0.25 * steps
    stats = engine.stats()
    assert stats.overlapped_steps >= fewer - 2 and stats.accepted_prediction_tokens > 100


@pytest.mark.parametrize("at", range(2, 9))
def test_aborts_and_arrivals_between_steps(at, ahead, make_engine, make_prompts, ask, run):
    first, late = ask(make_prompts(4, seed=4), max_tokens=20), ask(make_prompts(2, seed=5), max_tokens=20)
    late = [replace(request, request_id=f"late{number}") for number, request in enumerate(late)]
    expected = [result.token_ids for result in run(make_engine(), [*first, *late])]
    collected: dict[str, list[int]] = {request.request_id: [] for request in [*first, *late]}
    engine = make_engine()
    for request in first:
        engine.add_request(request)
    steps = 0
    while engine.has_work:
        steps += 1
        for output in engine.step():
            collected[output.request_id] += output.token_ids
        if steps == at:
            engine.abort("r1")
        if steps == at + 1:
            for request in late:
                engine.add_request(request)
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().vain_rows <= 6  # an arrival costs none
    answers = list(collected.values())
    assert answers[1] == expected[1][: len(answers[1])] and 0 < len(answers[1]) < 20
    del answers[1], expected[1]
    assert answers == expected


def test_a_small_pool_with_preemptions(ahead, monkeypatch, make_engine, make_prompts, ask):
    requests = ask(make_prompts(9, seed=6), max_tokens=40)
    options = {"num_gpu_blocks_override": 26, "max_num_seqs": 6, "block_size": 8}
    outputs, _ = stepped(engine := make_engine(**options), requests)
    assert engine.stats().preemptions > 0 and engine.stats().overlapped_steps
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert stepped(make_engine(**options), requests)[0] == outputs


def mixed(make_prompts, ask, number: int, answers: Sequence[list[int]] = ()):
    """A tenth has predictions, a twentieth penalties and a twentieth log-probabilities."""
    requests = []
    for at, request in enumerate(ask(make_prompts(number, seed=9), max_tokens=40, temperature=0.8, seed=1)):
        params = replace(request.params, max_tokens=30 + at % 17, stop_token_ids=(at % 97,))
        if at % 20 == 1:
            params = replace(params, presence_penalty=0.6, repetition_penalty=1.2)
        if at % 20 == 2:
            params = replace(params, logprobs=2)
        draft = (
            [token if place % 11 else 3 for place, token in enumerate(answers[at])] if answers and at % 10 == 0 else []
        )
        requests.append(replace(request, params=params, draft_ids=draft))
    return requests


def test_steps_of_every_kind_overlap(device, monkeypatch, make_engine, make_prompts, ask, run):
    """On a device that delays its results, the next step is there before a result is read; sampling waits for it."""
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_waiting": 200}
    monkeypatch.setattr(Runner, "runs_ahead", False)
    expected = run(make_engine(**options), mixed(make_prompts, ask, 96))
    answers = [result.token_ids for result in expected]
    monkeypatch.setattr(Runner, "runs_ahead", True)
    device.events.clear()
    requests = mixed(make_prompts, ask, 96, answers)
    results = run(engine := make_engine(**options), requests)
    assert [result.token_ids for result in results] == answers
    for result, other in zip(results, expected, strict=True):
        assert [score.top for score in result.logprobs] == [
            tuple((token, pytest.approx(value, abs=1e-4)) for token, value in score.top) for score in other.logprobs
        ]
    stats = engine.stats()
    assert stats.accepted_prediction_tokens > 0
    assert sum(device.overlapped) == stats.overlapped_steps >= 0.95 * stats.steps
    unforeseen = [
        1 + len(request.draft_ids)
        for result, request in zip(results, requests, strict=True)
        if len(result.token_ids) < request.params.max_tokens
    ]
    assert 0 < stats.vain_rows <= sum(unforeseen)
    order = [event for event in device.events if event != "read"]
    assert order == ["launch", "sample"] * (len(order) // 2)  # each step is sampled before the next is launched


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_are_the_same_for_every_token(temperature, ahead, monkeypatch, make_engine, make_prompts, ask, run):
    bias = tuple((token, 4.0 if token % 2 else -4.0) for token in range(40))
    requests = ask(make_prompts(4), max_tokens=12, temperature=temperature, logit_bias=bias, seed=3)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert answers == [result.token_ids for result in run(make_engine(), requests)]
    assert answers != [
        result.token_ids for result in run(make_engine(), ask(make_prompts(4), max_tokens=12, temperature=temperature))
    ]


def test_a_foreseen_end_costs_no_step(ahead, make_engine, make_prompts, ask):
    """With one place, the next prompt waits for a request to end: nothing is launched ahead of its last step."""
    requests = ask(make_prompts(5, seed=8), max_tokens=6, ignore_eos=True)
    _, steps = stepped(engine := make_engine(max_num_seqs=1), requests)
    assert steps == 5 * 6
    assert engine.stats().overlapped_steps == 5 * 5 and engine.stats().vain_rows == 0


def test_prompts_and_arrivals_overlap(ahead, make_engine, ask):
    """A long prompt is read in pieces beside a request that decodes."""
    requests = [*ask([[3] * 5], max_tokens=30), replace(ask([[4] * 100], max_tokens=3)[0], request_id="long")]
    _, steps = stepped(engine := make_engine(max_num_batched_tokens=16), requests)
    assert engine.stats().overlapped_steps == steps - 1 and engine.stats().vain_rows <= 1


def test_steps_are_launched_ahead_while_drafting_rests(ahead, monkeypatch, draft, make_engine, make_prompts, ask, run):
    engine = make_engine(draft=draft, draft_length="adaptive")
    monkeypatch.setattr(engine._speculator._policy, "is_resting", lambda sequences, ahead=0: True)
    run(engine, ask(make_prompts(2), max_tokens=10))
    assert engine.stats().overlapped_steps > 2


def test_a_draft_model_waits_for_tokens(ahead, monkeypatch, draft, make_engine, make_prompts, ask, run):
    """While the policy is asked in every step, even if it says no each time."""
    engine = make_engine(draft=draft, draft_length="adaptive")
    policy = engine._speculator._policy
    monkeypatch.setattr(policy, "is_resting", lambda sequences, ahead=0: False)
    monkeypatch.setattr(policy, "lengths", lambda offers, sequences, prompt_tokens: [0] * len(offers))
    run(engine, ask(make_prompts(3), max_tokens=10))
    assert engine.stats().overlapped_steps == 0


def test_repetitions_are_found_ahead(ahead, monkeypatch, make_engine, make_prompts, ask, run):
    bias = tuple((token, 6.0) for token in (1, 2, 3))  # the answers repeat themselves now and then
    requests = ask([[1, 2, 3] * 5, [3, 3, 2, 1] * 4], max_tokens=90, ignore_eos=True, logit_bias=bias)
    requests = [replace(request, params=replace(request.params, repetition_detection=False)) for request in requests]
    results = run(engine := make_engine(ngram=True, draft_length="fixed"), requests)
    assert engine.stats().ngram_accepted > 0 and engine.stats().overlapped_steps > 10
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert [result.token_ids for result in run(make_engine(), requests)] == [each.token_ids for each in results]


def test_a_device_knows_where_sequences_continue():
    """After their accepted drafts, with the token sampled there; a new sequence in a slot is another one."""

    decode, right, wrong, cut, new, prompt = range(6)
    drafts = np.array([-1, 7, 8, -1, 7, 8, -1, 5, 6, 9, -1])
    step = LaunchedStep(
        np.array([decode, right, wrong, cut, prompt]),
        np.array([0, 2, 2, 3, 0]),
        np.array([1, 3, 3, 4, 0]),
        drafts,
        *repeated(np.array([1, 3, 3, 4, 0])),
        torch.zeros(11, 1),
    )
    step.cut({3: 2})  # the grammar forbids the second draft
    assert len(step.logits) == 9
    sampled = [3, 7, 8, 4, 7, 5, 6, 5, 2]
    step.sampled_by(torch.tensor(sampled))
    tokens, accepted = step.read()
    assert tokens == sampled and accepted is not None and accepted.tolist() == [0, 2, 1, 1, 0]
    unread = step.unread(np.array([cut, new, right, wrong, decode]), 6)
    assert unread is not None and unread.rejected is not None
    assert unread.sequences == [0, 2, 3, 4]
    assert unread.token_ids.tolist() == [2, 4, 5, 3]
    assert unread.rejected.tolist() == [2, 0, 1, 0]
    shift = unread.shift(5)
    assert shift is not None and shift.tolist() == [2, 0, 0, 1, 0]
    one = np.ones(2, np.int64)
    plain = LaunchedStep(np.array([decode, right]), 0 * one, one, -one, *repeated(one), torch.zeros(2, 1))
    plain.sampled_by(torch.tensor([5, 6]))
    unread = plain.unread(np.array([right, new]), 6)
    assert unread is not None and unread.token_ids.tolist() == [6] and unread.shift(2) is None
    plain.drop([decode])
    assert plain.unread(np.array([decode]), 6) is None


def test_a_failed_step_leaves_nothing_behind(ahead, make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(3, seed=9), max_tokens=20)
    engine = make_engine()
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    assert engine._unread
    assert sorted(engine.suspects) == sorted(engine.reset()) == ["r0", "r1", "r2"]
    assert not engine._unread
    expected = [result.token_ids for result in run(make_engine(), requests)]
    assert [result.token_ids for result in run(engine, requests)] == expected


def test_a_request_that_has_ended_is_not_suspected(ahead, make_engine, ask):
    """Although the step that was launched before its end was known has computed it."""
    stays, ends = ask([[3] * 5, [4] * 5], max_tokens=20)
    engine = make_engine()
    engine.add_request(stays)
    engine.add_request(ends)
    for _ in range(3):
        engine.step()
    engine.abort(ends.request_id)
    assert engine.suspects == engine.reset() == [stays.request_id]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_drafts_are_the_same_unread(backend, draft_length, ahead, monkeypatch, draft, make_engine, make_prompts, ask):
    """The draft model's tokens are read once, after the last draft token."""
    requests = ask(make_prompts(6, seed=11), max_tokens=40, temperature=0.7, seed=3)
    options = {"draft_length": draft_length, "num_speculative_tokens": 5, "attention_backend": backend}
    first_passes: list[list[int]] = [[]]
    first_pass = DraftModel._first_pass

    def noted(self, batch):
        items, token_ids, num_drafting = first_pass(self, batch)
        first_passes[-1].append(sum(map(len, token_ids)))
        return items, token_ids, num_drafting

    monkeypatch.setattr(DraftModel, "_first_pass", noted)
    outputs, _ = stepped(engine := make_engine(draft=draft, **options), requests)
    assert draft_length == "adaptive" or engine.stats().draft_accepted > 0
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert stepped(make_engine(attention_backend=backend), requests)[0] == outputs
    if draft_length == "fixed":
        first_passes.append([])
        waiting, _ = stepped(beside := make_engine(draft=draft, **options), requests)
        assert first_passes[0] == first_passes[1]  # nothing is computed again
        assert waiting == outputs
        assert beside.stats().draft_proposed == engine.stats().draft_proposed
        assert beside.stats().draft_accepted == engine.stats().draft_accepted


def test_drafts_end_where_the_answer_would_unread(ahead, target, make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(8, seed=3), max_tokens=30)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    ending = [
        replace(request, params=replace(request.params, stop_token_ids=(answer[5 + at % 9],)))
        for at, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    engine = make_engine(draft=target, num_speculative_tokens=7, draft_length="fixed")
    for result, request, answer in zip(run(engine, ending), ending, answers, strict=True):
        assert result.token_ids == answer[: answer.index(request.params.stop_token_ids[0])]
        assert result.stats.draft_accepted == result.stats.draft_proposed


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    places=st.integers(1, 5),
    events=st.dictionaries(st.integers(1, 25), st.tuples(st.booleans(), st.integers(0, 6)), max_size=6),
)
def test_any_order_of_ends_aborts_and_arrivals(lengths, places, events, make_engine, make_prompts, ask, run):
    """Each request that is not aborted gets the same answer as alone."""
    requests = [
        replace(request, params=replace(request.params, max_tokens=length))
        for request, length in zip(ask(make_prompts(len(lengths), seed=12)), lengths, strict=True)
    ]
    expected = {request.request_id: run(make_engine(), [request])[0].token_ids for request in requests}
    late = {requests[number % len(requests)].request_id for comes, number in events.values() if comes}
    aborted: set[str] = set()
    tokens: dict[str, list[int]] = {name: [] for name in expected}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runner, "runs_ahead", True)
        engine = make_engine(max_num_seqs=places, num_gpu_blocks_override=24, block_size=8)
        waiting = {request.request_id: request for request in requests if request.request_id in late}
        for request in requests:
            if request.request_id not in late:
                engine.add_request(request)
        steps = 0
        while engine.has_work or waiting:
            steps += 1
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
            comes, number = events.get(steps, (False, -1))
            name = requests[number % len(requests)].request_id
            if comes and name in waiting:
                engine.add_request(waiting.pop(name))
            elif number >= 0 and not comes and name not in waiting:
                engine.abort(name)
                aborted.add(name)
            if steps > 30:
                for request in waiting.values():
                    engine.add_request(request)
                waiting = {}
        assert engine.stats().kv_blocks_used == 0
    for name, answer in tokens.items():
        assert answer == expected[name][: len(answer)]
        assert name in aborted or len(answer) == len(expected[name])


def test_a_step_without_work_says_nothing(ahead, make_engine, make_prompts, ask):
    engine = make_engine()
    assert list(engine.step()) == []
    for request in ask(make_prompts(2), max_tokens=10):
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    for number in range(2):
        engine.abort(f"r{number}")
    assert list(engine.step()) == [] and list(engine.step()) == []
    assert engine.stats().vain_rows == 2 and engine.stats().kv_blocks_used == 0
