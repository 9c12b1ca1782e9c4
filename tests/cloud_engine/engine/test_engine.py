"""The engine's promise: whatever is batched, chunked, cached, preempted or aborted, each request gets its answer."""

from __future__ import annotations

import pytest
import torch
from forward_chunks import Chunk, compute
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.protocol.errors import (
    ConfigurationError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
)
from updraft.protocol.sampling import SamplingParams


@pytest.fixture(scope="module")
def greedy(target, make_prompts):
    """Plain recomputation of the whole sequence, token by token: no cache, no batch."""

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            runner = Runner(target, 12, 16)
            tokens.append(int(compute(runner, [Chunk(tokens, 0, range(12), 1)]).argmax()))
        return tokens[len(prompt) :]

    prompts = make_prompts(16)
    return [generate(prompt, 24) for prompt in prompts]


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"block_size": 4, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 12},
        {"enable_prefix_caching": False, "block_size": 64},
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_greedy_output_is_the_same_under_every_configuration(config, greedy, make_engine, make_prompts, ask, run):
    results = run(make_engine(**config), ask(make_prompts(16)))
    assert [result.token_ids for result in results] == greedy
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.usefixtures("both_depths")
def test_a_small_pool_preempts_and_still_answers(greedy, make_engine, make_prompts, ask, run):
    engine = make_engine(num_gpu_blocks_override=8)
    assert [result.token_ids for result in run(engine, ask(make_prompts(16)))] == greedy
    assert engine.stats().preemptions > 0


@pytest.mark.usefixtures("both_depths")
def test_requests_join_and_leave_at_every_step(greedy, make_engine, make_prompts, ask):
    engine = make_engine(max_num_seqs=4)
    arriving = ask(make_prompts(16))
    answers: dict[str, list[int]] = {request.request_id: [] for request in arriving}
    most = 0
    while arriving or engine.has_work:
        if arriving:
            engine.add_request(arriving.pop(0))
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        most = max(most, engine.stats().running)
    assert list(answers.values()) == greedy
    assert most == 4


def test_a_prompt_and_a_decode_share_a_step(make_engine, make_prompts, ask):
    engine = make_engine()
    first, second = ask(make_prompts(2))
    engine.add_request(first)
    engine.step()
    engine.add_request(second)
    assert [output.request_id for output in engine.step()] == ["r0", "r1"]


@pytest.mark.usefixtures("both_depths")
def test_prefix_cache_is_hit_and_changes_nothing(make_engine, make_prompts, ask, run):
    engine = make_engine()
    prompt = make_prompts(9)[8]
    (first,) = run(engine, ask([prompt]))
    (second,) = run(engine, ask([prompt]))
    (extended,) = run(engine, ask([prompt + first.token_ids]))
    assert second.token_ids == first.token_ids
    assert first.stats.cached_tokens == 0
    assert second.stats.cached_tokens == 64  # of 70: whole blocks, and never the last token
    assert extended.stats.cached_tokens == 80  # of 94: generated blocks are found too, bar the one never finished
    assert engine.stats().prefix_hit_tokens == 144
    (fresh,) = run(make_engine(), ask([prompt + first.token_ids]))
    assert extended.token_ids == fresh.token_ids


def test_prefix_cache_survives_eviction(make_engine, make_prompts, ask, run):
    prompts = make_prompts(16, seed=5)
    small, roomy = make_engine(num_gpu_blocks_override=8, max_num_seqs=2), make_engine()
    for _ in range(2):
        requests = ask(prompts)
        assert [r.token_ids for r in run(small, requests)] == [r.token_ids for r in run(roomy, requests)]


@pytest.mark.usefixtures("both_depths")
def test_end_of_sequence_stops_without_being_shown(greedy, make_engine, make_prompts, ask, run):
    eos = greedy[0][5]
    cut = greedy[0].index(eos)
    (result,) = run(make_engine(eos=[eos]), ask(make_prompts(1)))
    assert (result.token_ids, result.finish_reason) == (greedy[0][:cut], "stop")
    assert result.stats.completion_tokens == cut


def test_max_tokens_none_fills_the_context(make_engine, make_prompts, ask, run):
    (result,) = run(make_engine(), ask([make_prompts(9)[8]], max_tokens=None))
    assert (len(result.token_ids), result.finish_reason) == (192 - 70, "length")


def test_max_tokens_none_is_what_the_pool_holds_where_that_is_less(make_engine, make_prompts, ask, run):
    engine = make_engine(num_gpu_blocks_override=8)
    assert engine.context_length == 128
    (result,) = run(engine, ask([make_prompts(9)[8]], max_tokens=None))
    assert (len(result.token_ids), result.finish_reason) == (128 - 70, "length")


def test_a_shorter_context_is_kept(make_engine, ask, run):
    engine = make_engine(max_model_len=50)
    assert engine.context_length == 50
    (result,) = run(engine, ask([[1] * 20], max_tokens=None))
    assert len(result.token_ids) == 30
    with pytest.raises(ContextLengthError, match="is 50 tokens, but the prompt has 47 and the answer needs 4"):
        engine.add_request(ask([[1] * 47], max_tokens=4)[0])


@pytest.mark.usefixtures("both_depths")
def test_logprobs_are_those_of_the_raw_distribution(target, make_engine, make_prompts, ask, run):
    prompts = make_prompts(4)
    results = run(make_engine(), ask(prompts, temperature=0.7, top_k=3, seed=1, logprobs=5))
    for prompt, result in zip(prompts, results, strict=True):
        tokens = prompt + result.token_ids
        logits = compute(Runner(target, 12, 16), [Chunk(tokens, 0, range(12), len(tokens))])
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = torch.tensor([entry.logprob for entry in result.logprobs])
        torch.testing.assert_close(
            chosen, expected.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0], atol=1e-4, rtol=0
        )
        top = torch.tensor([[value for _, value in entry.top] for entry in result.logprobs])
        torch.testing.assert_close(top, expected.topk(5).values, atol=1e-4, rtol=0)


def test_logprobs_zero_reports_the_chosen_token_only_and_none_nothing(make_engine, make_prompts, ask, run):
    chosen, nothing = (run(make_engine(), ask(make_prompts(1), logprobs=n))[0].logprobs for n in (0, None))
    assert len(chosen) == 24
    assert all(entry.top == () for entry in chosen)
    assert nothing == []


@pytest.mark.usefixtures("both_depths")
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(make_engine, make_prompts, ask, run):
    prompts = make_prompts(12)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=7, max_tokens=24)
    probe = GenerationRequest("probe", prompts[3], sampling)
    (alone,) = run(make_engine(), [probe])
    crowded = run(make_engine(max_num_batched_tokens=40), [*ask(prompts[4:], temperature=1.3), probe, *ask([])])[-1]
    assert crowded.token_ids == alone.token_ids
    (other_seed,) = run(make_engine(), ask([prompts[3]], temperature=1.0, top_p=0.9, top_k=40, seed=8))
    assert other_seed.token_ids != alone.token_ids


def test_requests_without_a_seed_differ_on_every_engine_but_each_repeats_itself(make_engine, make_prompts, ask, run):
    requests, others = (ask([make_prompts(1)[0]] * 3, temperature=2.0) for _ in range(2))
    first, again, other = (
        run(make_engine(**config), asked)
        for config, asked in [({}, requests), ({"num_gpu_blocks_override": 4}, requests), ({}, others)]
    )
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert len({tuple(r.token_ids) for r in [*first, *other]}) == 6


def test_abort_at_any_moment_frees_everything(make_engine, make_prompts, ask, draft):
    prompts = make_prompts(6)
    for steps in range(8):
        engine = make_engine(draft=draft, max_num_seqs=4, max_num_batched_tokens=24)
        for request in ask(prompts):
            engine.add_request(request)
        for _ in range(steps):
            engine.step()
        for index in range(6):
            engine.abort(f"r{index}")
        engine.abort("never seen")
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.running, stats.waiting, engine.has_work) == (0, 0, 0, False)
        assert stats.aborted_requests + stats.finished_requests == 6


@pytest.mark.usefixtures("both_depths")
def test_aborting_one_leaves_the_others_right(greedy, make_engine, make_prompts, ask):
    engine = make_engine()
    for request in ask(make_prompts(4)):
        engine.add_request(request)
    answers: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    for step in range(24):
        if step == 5:
            engine.abort("r1")
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    assert answers["r1"] == greedy[1][:5]
    assert [answers[name] for name in ("r0", "r2", "r3")] == [greedy[0], greedy[2], greedy[3]]


def test_bad_requests_are_refused_and_change_nothing(make_engine):
    engine = make_engine(max_waiting=1, max_num_seqs=1, num_gpu_blocks_override=4)

    def add(name: str, prompt: list[int], max_tokens: int | None = 4, drafts: list[int] | None = None) -> None:
        engine.add_request(GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens), drafts or []))

    with pytest.raises(InvalidRequestError, match="no tokens"):
        add("empty", [])
    with pytest.raises(InvalidRequestError, match="between 0 and 96"):
        add("foreign token", [97])
    with pytest.raises(InvalidRequestError, match="between 0 and 96"):
        add("foreign draft", [1], drafts=[-1])
    with pytest.raises(ContextLengthError, match="context is 64 tokens, but the prompt has 61 and the answer needs 4"):
        add("long", [1] * 61)
    add("a", [1])
    with pytest.raises(InvalidRequestError, match="in use"):
        add("a", [1])
    add("b", [1])
    with pytest.raises(OverloadedError, match="queue is full"):
        add("c", [1])
    assert engine.stats().waiting == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override"),
    ],
)
def test_impossible_configurations_are_refused(config, reason):
    with pytest.raises(ConfigurationError, match=reason):
        EngineConfig(**config)


def test_stats_count_what_happened(make_engine, make_prompts, ask):
    engine = make_engine()
    for request in ask(make_prompts(3)):
        engine.add_request(request)
    assert engine.stats().waiting == 3
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.steps, stats.generated_tokens) == (3, 0, 1, 3)
    assert stats.kv_blocks_used == 1 + 1 + 2
    assert stats.kv_slots_wasted == 4 * 16 - (3 + 16 + 17)


def test_a_request_counts_once_however_many_answers_it_has(make_engine) -> None:
    engine = make_engine()
    for name in ("first", "second"):
        params = SamplingParams(temperature=0.0, max_tokens=3)
        engine.add_request(GenerationRequest(name, list(range(40)), params, n=4))
        while engine.has_work:
            engine.step()
    stats = engine.stats()
    assert (stats.finished_requests, stats.aborted_requests) == (2, 0)
    assert (stats.prompt_tokens, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (80, 80, 32)


def test_aborted_requests_are_counted_up_to_the_abort(make_engine, ask, run) -> None:
    """As every answer is that a stop string ends."""
    engine = make_engine(draft_length="fixed")  # other lengths depend on measured times
    (whole,) = run(engine, ask([list(range(40))]))
    before = engine.stats()
    predicted = ask([list(range(40))] * 2, drafts=[[*whole.token_ids[:6], 96, 96]] * 2)
    engine.add_request(predicted[0])
    engine.step()
    engine.add_request(predicted[1])  # and this one never begins
    for request in predicted:
        engine.abort(request.request_id)
    stats = engine.stats()
    assert (stats.finished_requests, stats.aborted_requests) == (before.finished_requests, 2)
    assert stats.prompt_tokens == stats.prefix_query_tokens == 80
    assert stats.prefix_hit_tokens == 32
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (6, 2)


def test_one_answer_given_up_counts_with_its_prediction(make_engine, ask, run) -> None:
    engine = make_engine()
    (whole,) = run(engine, ask([[5] * 20]))
    (request,) = ask([[5] * 20], drafts=[whole.token_ids[:4]], n=2, max_tokens=9)
    engine.add_request(request)
    for _ in range(2):
        engine.step()
    engine.abort(request.request_id, 1)
    assert engine.stats().finished_requests == 1
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.finished_requests, stats.aborted_requests) == (2, 0)
    assert stats.accepted_prediction_tokens + stats.rejected_prediction_tokens == 2 * 4


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.5},
        {"logit_bias": ((7, 4.0), (11, -100.0)), "temperature": 0.9, "seed": 3, "typical_p": 0.8},
        {"min_tokens": 12, "stop_token_ids": (5, 6, 7)},
    ],
    ids=["penalties", "bias", "min_tokens"],
)
def test_edits_do_not_depend_on_drafts_chunks_or_company(make_engine, draft, make_prompts, run, ask, options) -> None:
    prompts = make_prompts(6)
    plain = [run(make_engine(max_num_seqs=1), ask([prompt], **options))[0].token_ids for prompt in prompts]
    together = run(make_engine(draft=draft, max_num_batched_tokens=24), ask(prompts, **options))
    assert [result.token_ids for result in together] == plain
    predicted = run(make_engine(), ask(prompts, drafts=plain, **options))
    assert [result.token_ids for result in predicted] == plain
    assert plain != [run(make_engine(), ask([prompt]))[0].token_ids for prompt in prompts]


def test_stop_reasons(make_engine, run, ask) -> None:
    free = run(make_engine(), ask([[1, 2, 3]]))[0].token_ids
    ending = free[4]
    first = free.index(ending)

    def answer(**options):
        return run(make_engine(eos=[ending]), ask([[1, 2, 3]], **options))[0]

    assert (answer().token_ids, answer().finish_reason) == (free[:first], "stop")
    assert answer(ignore_eos=True).token_ids == free
    assert answer(ignore_eos=True, stop_token_ids=(free[8],)).token_ids == free[: free.index(free[8])]
    late = answer(min_tokens=first + 1)
    assert len(late.token_ids) > first
    assert ending not in late.token_ids[: first + 1]


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "options", [{}, {"block_size": 64}, {"num_gpu_blocks_override": 30, "max_num_seqs": 6}], ids=str
)
@pytest.mark.parametrize("with_draft", [False, True])
def test_n_answers_are_those_of_n_requests_with_seeds_in_a_row(
    make_engine, draft, make_prompts, run, ask, options, with_draft
) -> None:
    prompts = make_prompts(7)
    sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 20}
    expected = [
        run(make_engine(), ask([prompt], seed=100 + index, **sampling))[0].token_ids
        for prompt in prompts
        for index in range(3)
    ]
    engine = make_engine(draft=draft if with_draft else None, **options)
    together = run(engine, ask(prompts, seed=100, n=3, **sampling))
    assert [result.token_ids for result in together] == expected


def test_answers_of_one_request_share_the_blocks_of_its_prompt(make_engine, ask) -> None:
    engine = make_engine(max_num_seqs=8)
    (request,) = ask([list(range(40))], n=8, temperature=1.0, seed=1, max_tokens=2)
    engine.add_request(request)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 7), "until the prompt is computed"
    engine.step()
    stats = engine.stats()
    assert stats.running == 7, "the first answer has two tokens"
    assert stats.kv_blocks_used == 2 + 7, "two full blocks, and a started one for each"
    assert (stats.prompt_tokens, stats.prefix_hit_tokens) == (40, 0)
    engine.step()
    assert engine.stats().kv_blocks_used == 0


def test_other_answers_wait_until_a_long_prompt_is_computed(make_engine, ask, run) -> None:
    (request,) = ask([list(range(90))], n=3, temperature=1.0, seed=1, max_tokens=1, prompt_logprobs=0)
    engine = make_engine(max_num_batched_tokens=20)
    engine.add_request(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        assert outputs or engine.stats().running == 1
    assert [(output.index, len(output.prompt_logprobs)) for output in outputs] == [(0, 89), (1, 0), (2, 0)]
    assert {output.stats.cached_tokens for output in outputs} == {0}
    assert engine.stats().steps == 5 + 1, "of each other answer only the last ten tokens of the prompt are computed"


@pytest.mark.parametrize("steps", [0, 1])
def test_other_answers_do_not_wait_for_a_dropped_one(make_engine, ask, run, steps) -> None:
    (request,) = ask([list(range(40))], n=3, temperature=1.0, seed=1, max_tokens=4)
    _, *others = run(make_engine(), [request])
    engine = make_engine(max_num_batched_tokens=20)
    engine.add_request(request)
    for _ in range(steps):
        engine.step()
    engine.abort(request.request_id, 0)
    answers = {1: [], 2: []}
    while engine.has_work:
        for output in engine.step():
            answers[output.index] += output.token_ids
    assert list(answers.values()) == [other.token_ids for other in others]
    assert engine.stats().kv_blocks_used == 0


def test_aborting_drops_all_answers(make_engine, ask) -> None:
    engine = make_engine(max_num_seqs=8)
    (request,) = ask([list(range(40))], n=5, max_tokens=50, temperature=1.0, seed=1)
    engine.add_request(request)
    for _ in range(4):
        engine.step()
    engine.abort(request.request_id)
    assert not engine.has_work
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().aborted_requests == 1


def test_one_of_several_answers_can_be_dropped(make_engine, ask, run) -> None:
    (request,) = ask([list(range(40))], n=3, max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    engine, answers, whole = make_engine(), ([], [], []), ([], [], [])
    for outputs, dropped in ((whole, False), (answers, True)):
        engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                outputs[output.index].extend(output.token_ids)
            if dropped and len(answers[1]) == 5:
                engine.abort(request.request_id, 1)
                engine.abort(request.request_id, 1)  # gone already
    assert answers == (whole[0], whole[1][:5], whole[2])
    assert [len(tokens) for tokens in whole] == [30, 30, 30]
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.running, stats.aborted_requests) == (0, 0, 0)


def test_the_last_answer_dropped_is_the_request_dropped(make_engine, ask) -> None:
    (request,) = ask([list(range(40))], n=2, max_tokens=30)
    engine = make_engine()
    engine.add_request(request)
    engine.step()
    for index in (0, 1):
        engine.abort(request.request_id, index)
    assert not engine.has_work
    assert engine.stats().aborted_requests == 1


def test_a_running_answer_is_found_four_blocks_at_a_time(make_engine, ask, run) -> None:
    (request,) = ask([list(range(16))], max_tokens=120, ignore_eos=True)
    (alone,) = run(make_engine(), [request])
    engine = make_engine()
    engine.add_request(request)
    known = list(range(16))

    def found_after(count: int) -> int:
        """Tokens that another request finds of the prompt and `count` tokens of the answer."""
        while len(known) < 16 + count:
            for output in engine.step():
                known.extend(output.token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add_request(GenerationRequest("follower", [*known, 1, 2], params))
        going_on, follower = engine.step()
        known.extend(going_on.token_ids)
        return follower.stats.cached_tokens

    assert (
        found_after(2 * 16 + 4) == 16
    )  # three blocks are full: the prompt's own block, and two that are not registered yet
    assert found_after(3 * 16 + 4) == 64
    assert alone.token_ids[: len(known) - 16] == known[16:]


def test_a_burst_fills_an_idle_batch_and_then_the_queue(make_engine, ask) -> None:
    engine = make_engine(max_num_seqs=4, max_waiting=2)
    requests = ask([[1, 2, 3]] * 7)
    for request in requests[:6]:
        engine.add_request(request)
    with pytest.raises(OverloadedError):
        engine.add_request(requests[6])
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (4, 2)


def fill(engine, add, requests) -> int:
    """The number of them that the engine takes."""
    for taken, request in enumerate(requests):
        try:
            add(request)
        except OverloadedError:
            return taken
    return len(requests)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_queue_is_as_long_as_allowed_where_blocks_are_scarce(make_engine, ask, at_once) -> None:
    """Places for 64, blocks for two, and one may wait."""
    engine = make_engine(max_num_seqs=64, max_waiting=1, num_gpu_blocks_override=5)
    requests = ask([[number] * 30 for number in range(20)], max_tokens=2)
    if not at_once:
        assert fill(engine, engine.add_request, requests[:2]) == 2
        engine.step()
        requests = requests[2:]
    assert fill(engine, engine.add_request, requests) == (3 if at_once else 1)
    engine.step()
    assert engine.stats().waiting == 1


def test_requests_being_prepared_need_blocks_too(make_engine, ask) -> None:
    engine = make_engine(max_num_seqs=64, max_waiting=1, num_gpu_blocks_override=5)
    assert fill(engine, engine.expect, ask([[1] * 30] * 20, max_tokens=2)) == 3


def test_a_request_takes_as_many_places_as_answers(make_engine, ask) -> None:
    engine = make_engine(max_num_seqs=4, max_waiting=2)
    assert fill(engine, engine.add_request, ask([[1, 2, 3]] * 9, n=4)) == 3
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 9)


@pytest.mark.parametrize("n", [0, 9])
def test_more_answers_than_places_are_refused(make_engine, ask, n) -> None:
    with pytest.raises(InvalidRequestError, match=rf"between 1 and 8 \(--max-num-seqs\).*got {n}\."):
        make_engine(max_num_seqs=8).add_request(ask([[1]], n=n)[0])
