"""Steps launched before the one in front of them is read: the same answers, and nothing kept that was in vain.

On a CPU nothing is gained by it, so it is switched on here: everything else is as it is on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.cloud_engine.engine.speculation.draft_model import DraftModel
from updraft.cloud_engine.engine.step import NewSequence
from updraft.cloud_engine.engine.types.slot_state import SlotState
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.worker import LaunchedStep, Worker
from updraft.protocol.sampling import ResolvedParams


@pytest.fixture
def ahead(monkeypatch):
    """Switches it on, and notes the batches that were launched ahead, and those that were launched in their turn."""
    launches = Launches()
    in_turn, before = Worker._launch, Worker.launch_ahead

    def launch(self, *arguments):
        launches.in_turn += 1
        return in_turn(self, *arguments)

    def launch_ahead(self, plan):
        launches.append(len(plan.slots))
        before(self, plan)

    monkeypatch.setattr(Runner, "runs_ahead", True)
    monkeypatch.setattr(Worker, "_launch", launch)
    monkeypatch.setattr(Worker, "launch_ahead", launch_ahead)
    return launches


class Launches(list[int]):
    """Sizes of the batches that were launched ahead; `in_turn`: how many others there were."""

    in_turn = 0

    def num_in_vain(self, steps: int) -> int:
        return len(self) + self.in_turn - steps


def stepped(engine, requests, between=None):
    """All tokens by request, `between(engine, step)` called behind every step."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        steps += 1
        if between is not None:
            between(engine, steps)
    assert engine.stats().kv_blocks_used == 0
    return answers, steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("block_size", [4, 16])
def test_answers_are_the_same(temperature, block_size, ahead, monkeypatch, make_engine, make_prompts, ask):
    """Over the borders of blocks; some end before the others, by their length."""
    requests = [
        replace(request, params=replace(request.params, max_tokens=12 + 5 * number))
        for number, request in enumerate(ask(make_prompts(6, seed=2), temperature=temperature, seed=5, ignore_eos=True))
    ]
    launched, steps = stepped(make_engine(block_size=block_size), requests)
    assert len(ahead) > steps // 2 and ahead.num_in_vain(steps) == 0
    monkeypatch.setattr(Runner, "runs_ahead", False)
    ahead.clear()
    assert stepped(make_engine(block_size=block_size), requests) == (launched, steps)
    assert not ahead


def test_step_after_a_stop_token_is_discarded(ahead, monkeypatch, make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(8, seed=3), max_tokens=30)
    monkeypatch.setattr(Runner, "runs_ahead", False)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    ending = [
        replace(request, params=replace(request.params, stop_token_ids=(answer[7 + at],)))
        for at, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    expected = [answer[: answer.index(answer[7 + at])] for at, answer in enumerate(answers)]
    monkeypatch.setattr(Runner, "runs_ahead", True)
    outputs, _ = stepped(make_engine(), ending)
    assert list(outputs.values()) == expected
    assert len(ahead) > 5


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
    answers = list(collected.values())
    assert answers[1] == expected[1][: len(answers[1])] and 0 < len(answers[1]) < 20
    del answers[1], expected[1]
    assert answers == expected


def test_a_small_pool_with_preemptions(ahead, monkeypatch, make_engine, make_prompts, ask):
    requests = ask(make_prompts(9, seed=6), max_tokens=40)
    options = {"num_gpu_blocks_override": 26, "max_num_seqs": 6, "block_size": 8}
    engine = make_engine(**options)
    outputs, _ = stepped(engine, requests)
    assert engine.stats().preemptions > 0 and ahead
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert stepped(make_engine(**options), requests)[0] == outputs


@pytest.mark.parametrize(
    "params",
    [{"presence_penalty": 0.5}, {"logprobs": 2}, {"min_tokens": 12, "stop_token_ids": (3,)}],
    ids=lambda params: next(iter(params)),
)
def test_requests_that_need_the_last_token_wait(params, ahead, make_engine, make_prompts, ask, run):
    """A penalty depends on the last token, and log-probabilities come from its step."""
    run(make_engine(), ask(make_prompts(4), max_tokens=12, **params))
    assert not ahead


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_are_the_same_for_every_token(temperature, ahead, monkeypatch, make_engine, make_prompts, ask, run):
    bias = tuple((token, 4.0 if token % 2 else -4.0) for token in range(40))
    requests = ask(make_prompts(4), max_tokens=12, temperature=temperature, logit_bias=bias, seed=3)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    assert ahead
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert answers == [result.token_ids for result in run(make_engine(), requests)]
    assert answers != [
        result.token_ids for result in run(make_engine(), ask(make_prompts(4), max_tokens=12, temperature=temperature))
    ]


def test_nothing_is_launched_ahead_of_prompts(ahead, make_engine, make_prompts, ask):
    """With one place, the next prompt waits for a request to end: that step is not given away."""
    requests = ask(make_prompts(5, seed=8), max_tokens=6, ignore_eos=True)
    _, steps = stepped(make_engine(max_num_seqs=1), requests)
    assert steps == 5 * 6
    assert len(ahead) == 5 * 4  # neither after the prompt's own step nor after the last
    assert ahead.num_in_vain(steps) == 0


def test_waiting_request_gets_a_free_slot_at_once(ahead, monkeypatch, make_engine, make_prompts, ask):
    """One of two answers ends before the other; the following step contains a prompt."""
    requests = [
        replace(request, params=replace(request.params, max_tokens=length))
        for request, length in zip(ask(make_prompts(4, seed=8), ignore_eos=True), (5, 30, 6, 7), strict=True)
    ]
    outcome = stepped(make_engine(max_num_seqs=2), requests)
    assert ahead and ahead.num_in_vain(outcome[1]) == 0
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert stepped(make_engine(max_num_seqs=2), requests) == outcome


def test_nothing_is_launched_ahead_of_a_long_prompt(ahead, make_engine, ask):
    """Which is read in pieces, beside nobody or beside others that decode."""
    requests = [*ask([[3] * 5], max_tokens=30), replace(ask([[4] * 100], max_tokens=3)[0], request_id="long")]
    _, steps = stepped(make_engine(max_num_batched_tokens=16), requests)
    assert ahead.num_in_vain(steps) == 0


def test_steps_are_launched_ahead_while_drafting_rests(ahead, monkeypatch, draft, make_engine, make_prompts, ask, run):
    engine = make_engine(draft=draft, draft_length="adaptive")
    monkeypatch.setattr(engine._speculator._policy, "is_resting", lambda sequences, ahead=0: True)
    run(engine, ask(make_prompts(2), max_tokens=10))
    assert len(ahead) > 2


def test_nothing_is_launched_ahead_of_drafts(ahead, monkeypatch, draft, make_engine, make_prompts, ask, run):
    """While the policy is asked in every step, even if it says no each time."""
    engine = make_engine(draft=draft, draft_length="adaptive")
    policy = engine._speculator._policy
    monkeypatch.setattr(policy, "is_resting", lambda sequences, ahead=0: False)
    monkeypatch.setattr(policy, "lengths", lambda offers, sequences, prompt_tokens: [0] * len(offers))
    run(engine, ask(make_prompts(3), max_tokens=10))
    assert not ahead


def test_a_step_covers_the_sequences_that_it_holds():
    """Whatever their order is now; a sequence that is new in a slot is not the one that was launched there."""

    def new_state(slot):
        return SlotState(NewSequence(slot, [1, 2], 1, 9, ResolvedParams(), 0, frozenset(), [0]))

    batch = [new_state(slot) for slot in range(3)]
    launched = LaunchedStep(batch, 3, torch.tensor([5, 6, 7]), rows := list("abc"))
    assert launched.of(batch) is launched
    assert launched.of(batch[1:]).read() == [6, 7] and launched.of(batch[1:]).rows == rows[1:]
    assert launched.of([batch[2], batch[0]]).read() == [7, 5]
    assert launched.of([batch[0], new_state(1), batch[2]]) is None and launched.of([new_state(1)]) is None


def test_a_failed_step_leaves_nothing_behind(ahead, monkeypatch, make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(3, seed=9), max_tokens=20)
    engine = make_engine()
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    assert engine._worker._ahead is not None
    assert sorted(engine.reset()) == ["r0", "r1", "r2"]
    assert engine._worker._ahead is None
    expected = [result.token_ids for result in run(make_engine(), requests)]
    assert [result.token_ids for result in run(engine, requests)] == expected


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_drafts_are_the_same_unread(backend, draft_length, ahead, monkeypatch, draft, make_engine, make_prompts, ask):
    """The draft model's tokens are read once, after the last draft token."""
    requests = ask(make_prompts(6, seed=11), max_tokens=40, temperature=0.7, seed=3)
    options = {"draft_length": draft_length, "num_speculative_tokens": 5, "attention_backend": backend}
    first_passes: list[list[int]] = [[]]
    first_pass = DraftModel._first_pass

    def noted(self, batch):
        drafting, chunks = first_pass(self, batch)
        first_passes[-1].append(sum(len(chunk.token_ids) for chunk in chunks))
        return drafting, chunks

    monkeypatch.setattr(DraftModel, "_first_pass", noted)
    outputs, _ = stepped(engine := make_engine(draft=draft, **options), requests)
    assert draft_length == "adaptive" or (engine.stats().draft_accepted > 0 and not ahead)
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
    assert list(engine.step()) == [] and ahead
    assert engine.stats().steps == 3 and engine.stats().kv_blocks_used == 0
