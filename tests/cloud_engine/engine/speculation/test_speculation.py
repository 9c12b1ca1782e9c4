"""Speculation changes how fast tokens come, never which: drafts and predictions, right, wrong and in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.kv.sizing import KVCacheSize
from updraft.cloud_engine.engine.speculation import draft_model
from updraft.cloud_engine.engine.speculation.cost_table import CostTable
from updraft.cloud_engine.engine.speculation.draft_model import DraftModel, check_same_vocabulary
from updraft.cloud_engine.engine.speculation.draft_policy import DraftPolicy
from updraft.cloud_engine.engine.speculation.drafter import Drafter
from updraft.cloud_engine.engine.speculation.speculator import Speculator
from updraft.cloud_engine.engine.types.draft_record import Acceptance
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState, ScheduledRequest
from updraft.cloud_engine.models.decoder import Decoder
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams

LENGTH = 24


@pytest.fixture(scope="module")
def plain(make_engine, make_prompts, ask, run):
    """Answers without speculation, one request at a time."""
    prompts = make_prompts(48, seed=9)
    return prompts, [run(make_engine(max_num_seqs=1), ask([prompt], max_tokens=LENGTH))[0] for prompt in prompts]


def predictions(kind: str, answers: list[list[int]]) -> list[list[int]]:
    def spoil(answer: list[int]) -> list[int]:
        match kind:
            case "right":
                return answer
            case "too long":
                return answer + [1, 2, 3] * 30
            case "wrong":
                return [(token + 1) % 97 for token in answer]
            case "one substitution":
                return [*answer[:6], (answer[6] + 1) % 97, *answer[7:]]
            case "insertion":
                return [*answer[:6], 1, 2, 3, *answer[6:]]
            case "deletion":
                return [*answer[:6], *answer[9:]]
            case _:
                return answer[:8]

    return [spoil(answer) for answer in answers]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_draft_model_changes_no_token(batch_size, plain, make_engine, ask, run, draft):
    prompts, expected = plain
    engine = make_engine(draft=draft, max_num_seqs=batch_size, draft_length="fixed")
    results = run(engine, ask(prompts, max_tokens=LENGTH))
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    stats = engine.stats()
    assert 0.1 < stats.draft_accepted / stats.draft_proposed < 0.95  # else this test says little
    assert sum(r.stats.draft_accepted for r in results) == stats.draft_accepted


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["right", "too long", "wrong", "one substitution", "insertion", "deletion", "start"])
def test_a_prediction_changes_no_token(kind, batch_size, plain, make_engine, ask, run, draft):
    prompts, expected = plain[0][:16], plain[1][:16]
    drafts = predictions(kind, [e.token_ids for e in expected])
    engine = make_engine(draft=draft if batch_size == 4 else None, max_num_seqs=batch_size, draft_length="fixed")
    results = run(engine, ask(prompts, max_tokens=LENGTH, drafts=drafts))
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    for result, proposed in zip(results, drafts, strict=True):
        counts = result.stats
        assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens == len(proposed)
        if kind in ("right", "too long"):
            assert counts.accepted_prediction_tokens == LENGTH
        if kind == "wrong":
            assert counts.accepted_prediction_tokens <= 3  # a token may repeat by chance
    if batch_size == 4 and kind not in ("right", "too long", "one substitution"):
        assert engine.stats().draft_proposed > 0, "where the prediction is spent or lost, the draft model takes over"


def test_a_right_prediction_is_verified_together_with_the_prompt(plain, make_engine, ask, run):
    prompts, expected = plain
    engine = make_engine(draft_length="fixed")
    run(engine, ask(prompts[:1], max_tokens=LENGTH, drafts=[expected[0].token_ids]))
    assert engine.stats().steps == 1


def test_an_edited_prediction_is_picked_up_again(plain, make_engine, ask, run):
    prompts, expected = plain
    answers = [e.token_ids for e in expected[:16]]
    for kind in ("one substitution", "insertion", "deletion"):
        engine = make_engine(draft_length="fixed")
        run(engine, ask(prompts[:16], max_tokens=LENGTH, drafts=predictions(kind, answers)))
        stats = engine.stats()
        assert stats.accepted_prediction_tokens > 16 * LENGTH * 0.6, kind
        assert stats.steps < LENGTH


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}], ids=str)
def test_sampled_output_is_the_same_with_any_draft(params, plain, make_engine, ask, run, draft):
    prompts = plain[0][:16]
    ask_sampled = {"max_tokens": LENGTH, "seed": 11, "logprobs": 2, **params}
    expected = run(make_engine(), ask(prompts, **ask_sampled))
    answers = [e.token_ids for e in expected]
    spoilt = [answer[:10] + [0] * 9 for answer in answers]
    for drafts in ([], answers, spoilt):
        engine = make_engine(draft=draft, draft_length="fixed")
        results = run(engine, ask(prompts, drafts=drafts, **ask_sampled))
        assert [r.token_ids for r in results] == answers
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(
                [entry.logprob for entry in result.logprobs],
                [entry.logprob for entry in reference.logprobs],
                atol=1e-4,
                rtol=0,
            )
        if not drafts:
            assert engine.stats().draft_accepted > 0


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "config", [{"num_gpu_blocks_override": 8}, {"max_num_batched_tokens": 20}, {"block_size": 4}], ids=str
)
def test_speculation_with_preemption_chunking_and_prefix_hits(config, plain, make_engine, ask, run, draft):
    prompts, expected = plain[0][:16], [e.token_ids for e in plain[1][:16]]
    engine = make_engine(draft=draft, draft_length="fixed", **config)
    for _ in range(2):  # the second round finds prefixes
        results = run(engine, ask(prompts, max_tokens=LENGTH, drafts=predictions("one substitution", expected)))
        assert [r.token_ids for r in results] == expected
    stats = engine.stats()
    assert stats.preemptions > 0 if config == {"num_gpu_blocks_override": 8} else stats.prefix_hit_tokens > 0


def test_a_draft_as_good_as_the_target_is_always_accepted(plain, target, make_engine, ask, run):
    prompts, expected = plain
    engine = make_engine(draft=target, num_speculative_tokens=5, draft_length="fixed")
    for _ in range(2):  # also where the prompt comes from the prefix cache
        results = run(engine, ask(prompts[:16], max_tokens=LENGTH))
        assert [r.token_ids for r in results] == [e.token_ids for e in expected[:16]]
    stats = engine.stats()
    assert stats.draft_accepted == stats.draft_proposed
    assert stats.steps == 2 * LENGTH / 6


@pytest.mark.usefixtures("both_depths")
def test_end_of_sequence_inside_an_accepted_draft(plain, make_engine, ask, run, draft):
    prompts, expected = plain
    answer = expected[0].token_ids
    eos = answer[10]
    cut = answer.index(eos)
    (result,) = run(make_engine(eos=[eos], draft=draft), ask(prompts[:1], drafts=[answer], logprobs=1))
    assert (result.token_ids, result.finish_reason) == (answer[:cut], "stop")
    assert len(result.logprobs) == cut
    assert result.stats.accepted_prediction_tokens == cut


COMPANY = {
    "preempted": {"num_gpu_blocks_override": 10, "max_num_seqs": 6},
    "chunked": {"max_num_batched_tokens": 20},
    "blocks of 4": {"block_size": 4},
    "uncached": {"enable_prefix_caching": False},
}
DRAFTERS = {
    "draft": {"draft_length": "fixed"},
    "ngram": {"draft_length": "fixed", "ngram": True},
    "both": {"ngram": True, "draft_length": "fixed", "num_speculative_tokens": 3},
    "adaptive": {"ngram": True},
}


@pytest.fixture(scope="module")
def composed(make_engine, make_prompts, ask, run):
    """Everything at once, without drafts: penalties, log-probabilities, several answers, sampling, repetition."""
    prompts = [prompt * 3 for prompt in make_prompts(8, seed=4) if len(prompt) < 25]
    penalties = {"repetition_penalty": 0.8, "presence_penalty": -0.5, "logprobs": 2}
    options = {"temperature": 0.6, "seed": 5, "top_p": 0.9, "n": 2, "max_tokens": 16, **penalties}
    return prompts, options, run(make_engine(max_num_seqs=2), ask(prompts, **options))


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("drafters", DRAFTERS)
def test_every_drafter_composes_with_everything(drafters, company, composed, make_engine, ask, run, draft):
    prompts, options, expected = composed
    engine = make_engine(draft=None if drafters == "ngram" else draft, **DRAFTERS[drafters], **COMPANY[company])
    for _ in range(2):  # the second time from the prefix cache
        results = run(engine, ask(prompts, **options))
        assert [r.token_ids for r in results] == [e.token_ids for e in expected]
        for result, reference in zip(results, expected, strict=True):
            for mine, theirs in zip(result.logprobs, reference.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    stats = engine.stats()
    assert stats.preemptions > 0 or company != "preempted"
    if drafters != "adaptive":
        assert stats.speculative_steps > 0
        assert (stats.draft_accepted > 0) == (drafters != "ngram")
        assert (stats.ngram_proposed > 0) == (drafters != "draft")


def test_a_draft_that_pauses_catches_up(plain, target, make_engine, ask, run):
    """It computed nothing of what was answered without it, and is right from its first token on."""
    prompts, expected = plain
    engine = make_engine(draft=target, num_speculative_tokens=5, draft_length="fixed", max_num_batched_tokens=40)
    speculator = engine._speculator
    speculator._policy = Paused(CostTable({(1, 0): 1.0, (1, 1): 1.0}))
    for request in ask(prompts[8:9], max_tokens=LENGTH):  # 70 tokens of prompt: more than a step's budget
        engine.add_request(request)
    tokens = [token for _ in range(6) for output in engine.step() for token in output.token_ids]
    assert engine.stats().draft_proposed == 0
    speculator._policy = None
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == expected[8].token_ids
    assert engine.stats().draft_accepted == engine.stats().draft_proposed > 0


@pytest.mark.parametrize("penalty", [0.0, 0.3], ids=["one call", "pass by pass"])
def test_a_draft_ends_where_the_answer_would(penalty, plain, target, make_engine, ask, run):
    """A draft model that says what the target says proposes nothing in vain, beside others that go on."""
    engine = make_engine(draft=target, num_speculative_tokens=7, draft_length="fixed")
    requests = ask(plain[0], max_tokens=LENGTH, presence_penalty=penalty)
    answers = [result.token_ids for result in run(make_engine(), requests)]
    ending = [
        replace(request, params=replace(request.params, stop_token_ids=(answer[5 + at % 9],)))
        for at, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    for result, request, answer in zip(run(engine, ending), ending, answers, strict=True):
        assert result.token_ids == answer[: answer.index(request.params.stop_token_ids[0])]
        assert result.stats.draft_accepted == result.stats.draft_proposed
    assert engine.stats().draft_accepted > 0


@pytest.mark.parametrize("at_once", [True, False], ids=["one call", "pass by pass"])
def test_a_draft_that_would_end_too_early_is_wrong_like_any_other(
    at_once, target, make_engine, make_prompts, ask, run, monkeypatch
):
    """Its words are left out, and that it would stop is remembered: a small model that is done before the target is."""
    requests = ask(make_prompts(8, seed=3), max_tokens=LENGTH)
    expected = [result.token_ids for result in run(make_engine(), requests)]
    end = min(set(range(97)) - {token for answer in expected for token in answer})
    engine = make_engine(draft=target, eos=(end,), draft_length="fixed", num_speculative_tokens=4)
    (drafter,) = engine._speculator._drafters
    if at_once and not drafter._can_extend:
        pytest.skip("not all of this is C")
    drafter._can_extend = at_once
    extend, sampled = drafter._runner.extend, draft_model.sample

    def ends_at_once(first, spans, rows):
        return [[*tokens[:-1], end] for tokens in extend(first, spans, rows)]

    def ends_by_itself(logits, rows):
        return torch.full_like(sampled(logits, rows), end)

    monkeypatch.setattr(
        *(drafter._runner, "extend", ends_at_once) if at_once else (draft_model, "sample", ends_by_itself)
    )
    own, add = engine._speculator._records["draft"].acceptance, Acceptance.add
    tested: list[tuple[int, int]] = []

    def noted(self: Acceptance, right: int, guessed: int) -> None:
        tested.extend([(right, min(right + 1, guessed))] if self is own else [])
        add(self, right, guessed)

    monkeypatch.setattr(Acceptance, "add", noted)
    assert [result.token_ids for result in run(engine, requests)] == expected
    acceptance, stats = sum(right for right, _ in tested) / sum(number for _, number in tested), engine.stats()
    assert stats.draft_accepted == stats.draft_proposed
    assert (stats.draft_proposed > 0) == at_once
    # three of four right, or none
    assert 0.7 < acceptance < 0.8 if at_once else acceptance < 0.1


class Alone(Drafter):
    name = "alone"

    def offer(self, state, limit):
        return limit

    def propose(self, batch, rows_of):
        raise AssertionError("not asked")


@pytest.mark.parametrize(
    ("draft", "accepted", "predicts_end", "ends", "counted"),
    [
        ([7, 8], 2, True, True, (3, 3)),
        ([7, 8], 2, True, False, (2, 3)),
        ([7, 8], 1, True, False, (1, 2)),
        ([7, 8], 2, False, True, (2, 2)),
        ([], 0, True, False, (0, 1)),
        ([], 0, True, True, (1, 1)),
        ([], 0, False, True, (0, 0)),
    ],
)
def test_predicted_end_counts_as_a_draft(draft, accepted, predicts_end, ends, counted) -> None:
    speculator = Speculator([drafter := Alone()], EngineConfig())
    request = GenerationRequest("r", [1])
    state = RequestState(request, 10, ResolvedParams(), 0, frozenset({2}), [1], PredictionCursor([]))
    item = ScheduledRequest(state, 1, draft, drafter.name, 4, predicts_end)
    speculator.record(item, accepted, ends=ends)
    record, expected = speculator._records["alone"], Acceptance()
    if counted[1]:
        expected.add(*counted)
    assert record.acceptance.mean == expected.mean
    assert (record.proposed, record.accepted) == (len(draft), accepted)
    assert (state.drafts.proposed, state.drafts.accepted) == (len(draft), accepted)


class Paused(DraftPolicy):
    """A policy that never drafts."""

    def is_resting(self, sequences: int, ahead: int = 0) -> bool:
        return True


def test_a_cached_prefix_without_its_draft_half_is_still_a_hit(plain, target, make_engine, ask, run):
    prompts, expected = plain
    engine = make_engine(draft=target, num_speculative_tokens=5, draft_length="fixed")
    engine._speculator._policy = Paused(CostTable({(1, 0): 1.0, (1, 1): 1.0}))
    run(engine, ask(prompts[8:9], max_tokens=LENGTH))
    engine._speculator._policy = None
    (result,) = run(engine, ask(prompts[8:9], max_tokens=LENGTH))
    assert (result.token_ids, result.stats.cached_tokens) == (expected[8].token_ids, 64)
    assert result.stats.draft_accepted == result.stats.draft_proposed > 0


def test_a_draft_of_another_vocabulary_is_refused(target, make_engine):
    with pytest.raises(ConfigurationError, match="with the target's tokenizer"):
        make_engine(draft=Decoder(replace(target.config, vocab_size=98)))


WORDS = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("rows", "draft", "reason"),
    [
        (2, {"a": 0, "b": 1}, "'c'"),
        (4, {"a": 0, "c": 1, "b": 2}, r"2 of 3 tokens differ, such as id 1: 'c' in the draft model, 'b' in the target"),
        (5, None, "draft model has 5 tokens, the target model 4"),
    ],
)
def test_why_a_vocabulary_is_refused(rows, draft, reason):
    with pytest.raises(ConfigurationError, match=reason):
        check_same_vocabulary(4, rows, WORDS, draft)


@pytest.mark.parametrize(("rows", "draft"), [(3, WORDS), (64, {**WORDS, "d": 3}), (4, None)])
def test_padding_is_no_difference(rows, draft):
    check_same_vocabulary(4, rows, WORDS, draft)


@pytest.mark.parametrize("rows", [91, 120])
def test_a_draft_padded_differently_drafts(rows, plain, target, fresh_draft, make_engine, ask, run):
    """The last rows of a head are no tokens: fewer or more of them change nothing."""
    prompts, expected = plain
    padded = resized(fresh_draft, rows)
    config = EngineConfig(num_gpu_blocks_override=192)
    drafter = DraftModel(padded, target.config, KVCacheSize.of([target], config), config)
    engine = make_engine(
        num_gpu_blocks_override=192, num_speculative_tokens=2, draft_length="fixed", drafters=[drafter]
    )
    sampled = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "logit_bias": ((96, 2.0),), "max_tokens": LENGTH}
    assert [r.token_ids for r in run(engine, ask(prompts, max_tokens=LENGTH))] == [e.token_ids for e in expected]
    without = run(make_engine(), ask(prompts[:8], **sampled))
    assert [r.token_ids for r in run(engine, ask(prompts[:8], **sampled))] == [w.token_ids for w in without]
    stats = engine.stats()
    assert stats.draft_accepted > 0.1 * stats.draft_proposed > 0


def test_tokens_beyond_the_targets_vocabulary_are_never_drafted(plain, target, fresh_draft, make_engine, ask, run):
    """Though the draft model thinks them the likeliest: the target has no embedding for them."""
    prompts, expected = plain
    padded = resized(fresh_draft, 120)
    padded.lm_head.weight[97:] = 9 * padded.lm_head.weight[:23].abs()
    config = EngineConfig(num_gpu_blocks_override=192)
    drafter = DraftModel(padded, target.config, KVCacheSize.of([target], config), config)
    engine = make_engine(
        num_gpu_blocks_override=192, num_speculative_tokens=4, draft_length="fixed", drafters=[drafter]
    )
    results = run(engine, ask(prompts[:8], max_tokens=LENGTH))
    assert [r.token_ids for r in results] == [e.token_ids for e in expected[:8]]
    assert engine.stats().draft_proposed > 0


def test_plain_requests_and_others_are_drafted_for_together(plain, target, make_engine, ask, run):
    """In one call and pass by pass; a draft as good as the target is always right."""
    prompts, _ = plain
    others = {"presence_penalty": 0.7, "temperature": 0.8, "seed": 3, "max_tokens": LENGTH}
    kinds = [{"max_tokens": LENGTH}, others, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "max_tokens": LENGTH}]
    cases = [(prompt, kinds[index % 3]) for index, prompt in enumerate(prompts[:9])]

    def answers(engine):
        requests = [ask([prompt], **options)[0] for prompt, options in cases]
        requests = [replace(request, request_id=str(index)) for index, request in enumerate(requests)]
        return [result.token_ids for result in run(engine, requests)]

    engine = make_engine(draft=target, num_speculative_tokens=5, draft_length="fixed")
    assert answers(engine) == answers(make_engine())
    stats = engine.stats()
    assert stats.draft_accepted == stats.draft_proposed > 0


def resized(model: Decoder, rows: int) -> Decoder:
    """The same model with a head of as many rows; new ones are zero."""
    twin = Decoder(replace(model.config, vocab_size=rows)).requires_grad_(False).eval()
    state = model.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        kept = state[name][:rows]
        state[name] = torch.cat((kept, torch.zeros(rows - len(kept), kept.shape[1])))
    twin.load_state_dict(state)
    return twin


def test_the_cursor_is_cautious_after_a_miss_and_counts_each_token_once() -> None:
    draft = list(range(100, 160))
    cursor = PredictionCursor(draft)
    assert cursor.propose(1000) == draft
    assert cursor.propose(8) == draft[:8]
    generated = [100, 101, 7, 8]
    cursor.advance(generated[:3], 3, 60)
    cursor.advance(generated, 1, 8)
    assert (cursor.num_accepted, cursor.propose(1000)) == (2, [])
    for token in (104, 105, 106):
        generated.append(token)
        cursor.advance(generated, 1, 0)
    assert cursor.propose(1000) == draft[7:15]
    generated += draft[7:16]
    cursor.advance(generated, 9, 8)
    assert cursor.num_accepted == 2 + 9
    assert cursor.propose(1000) == draft[16:32]
    assert PredictionCursor([]).propose(5) == []


def test_the_cursor_takes_a_miss_behind_tokens_that_held_for_one_other_token() -> None:
    draft = list(range(100, 160))
    cursor = PredictionCursor(draft)
    cursor.advance([100, 101, 7], 3, 60)
    assert cursor.propose(1000) == draft[3:11]
    cursor.advance([100, 101, 7, 103, 8], 2, 8)
    assert (cursor.num_accepted, cursor.propose(1000)) == (3, draft[5:13])
    useless = PredictionCursor(draft)
    useless.advance([7], 1, 8)
    assert useless.propose(1000) == []
