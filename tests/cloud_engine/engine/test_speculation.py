"""Speculation changes how fast tokens come, never which: drafts and predictions, right, wrong and in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from updraft.cloud_engine.engine.prediction import PredictionCursor
from updraft.cloud_engine.models.decoder import Decoder
from updraft.protocol.errors import ConfigurationError

LENGTH = 24


@pytest.fixture(scope="module")
def plain(make_engine, make_prompts, ask, run):
    """Answers without speculation, one request at a time."""
    prompts = make_prompts(48, seed=9)
    return prompts, [run(make_engine(max_batch_size=1), ask([prompt], max_tokens=LENGTH))[0] for prompt in prompts]


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
    engine = make_engine(draft=draft, max_batch_size=batch_size)
    results = run(engine, ask(prompts, max_tokens=LENGTH))
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    stats = engine.stats()
    assert 0.1 < stats.draft_accepted / stats.draft_proposed < 0.95  # else this test says little
    assert sum(r.stats.draft_accepted for r in results) == stats.draft_accepted


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["right", "too long", "wrong", "one substitution", "insertion", "deletion", "start"])
def test_a_prediction_changes_no_token(kind, batch_size, plain, make_engine, ask, run, draft):
    prompts, expected = plain[0][:16], plain[1][:16]
    drafts = predictions(kind, [e.token_ids for e in expected])
    engine = make_engine(draft=draft if batch_size == 4 else None, max_batch_size=batch_size)
    results = run(engine, ask(prompts, max_tokens=LENGTH, drafts=drafts))
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    for result, proposed in zip(results, drafts, strict=True):
        counts = result.stats
        assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens == len(proposed)
        if kind in ("right", "too long"):
            assert counts.accepted_prediction_tokens == LENGTH
        if kind == "wrong":
            assert counts.accepted_prediction_tokens <= 3  # a token may repeat by chance


def test_a_right_prediction_is_verified_together_with_the_prompt(plain, make_engine, ask, run):
    prompts, expected = plain
    engine = make_engine()
    run(engine, ask(prompts[:1], max_tokens=LENGTH, drafts=[expected[0].token_ids]))
    assert engine.stats().steps == 1


def test_an_edited_prediction_is_picked_up_again(plain, make_engine, ask, run):
    prompts, expected = plain
    answers = [e.token_ids for e in expected[:16]]
    for kind in ("one substitution", "insertion", "deletion"):
        engine = make_engine()
        run(engine, ask(prompts[:16], max_tokens=LENGTH, drafts=predictions(kind, answers)))
        stats = engine.stats()
        assert stats.accepted_prediction_tokens > 16 * LENGTH * 0.6, kind
        assert stats.steps < LENGTH


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}], ids=str)
def test_sampled_output_is_the_same_with_any_draft(params, plain, make_engine, ask, run, draft):
    prompts = plain[0][:16]
    ask_sampled = {"max_tokens": LENGTH, "seed": 11, "logprobs": 2, **params}
    expected = run(make_engine(), ask(prompts, **ask_sampled))
    answers = [e.token_ids for e in expected]
    spoilt = [answer[:10] + [0] * 9 for answer in answers]
    for drafts in ([], answers, spoilt):
        engine = make_engine(draft=draft)
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


@pytest.mark.parametrize("config", [{"num_blocks": 8}, {"token_budget": 20}, {"block_size": 4}], ids=str)
def test_speculation_with_preemption_chunking_and_prefix_hits(config, plain, make_engine, ask, run, draft):
    prompts, expected = plain[0][:16], [e.token_ids for e in plain[1][:16]]
    engine = make_engine(draft=draft, **config)
    for _ in range(2):  # the second round finds prefixes, whose draft half must be there too
        results = run(engine, ask(prompts, max_tokens=LENGTH, drafts=predictions("one substitution", expected)))
        assert [r.token_ids for r in results] == expected
    stats = engine.stats()
    assert stats.preemptions > 0 if config == {"num_blocks": 8} else stats.prefix_hit_tokens > 0


def test_a_draft_as_good_as_the_target_is_always_accepted(plain, target, make_engine, ask, run):
    prompts, expected = plain
    engine = make_engine(draft=target, num_draft_tokens=5)
    for _ in range(2):  # also where the prompt comes from the prefix cache
        results = run(engine, ask(prompts[:16], max_tokens=LENGTH))
        assert [r.token_ids for r in results] == [e.token_ids for e in expected[:16]]
    stats = engine.stats()
    assert stats.draft_accepted == stats.draft_proposed
    assert stats.steps == 2 * LENGTH / 6


def test_end_of_sequence_inside_an_accepted_draft(plain, make_engine, ask, run, draft):
    prompts, expected = plain
    answer = expected[0].token_ids
    eos = answer[10]
    cut = answer.index(eos)
    (result,) = run(make_engine(eos=[eos], draft=draft), ask(prompts[:1], drafts=[answer], logprobs=1))
    assert (result.token_ids, result.finish_reason) == (answer[:cut], "stop")
    assert len(result.logprobs) == cut
    assert result.stats.accepted_prediction_tokens == cut


def test_a_draft_of_another_vocabulary_is_refused(target, make_engine):
    with pytest.raises(ConfigurationError, match="share the target's tokenizer"):
        make_engine(draft=Decoder(replace(target.config, vocab_size=98)))


def test_the_cursor_is_cautious_after_a_miss_and_counts_each_token_once() -> None:
    draft = list(range(100, 160))
    cursor = PredictionCursor(draft)
    assert cursor.propose(1000) == draft
    generated = [100, 101, 7]
    cursor.advance(generated, 3, 60)
    assert (cursor.num_accepted, cursor.propose(1000)) == (2, [])
    for token in (103, 104, 105):
        generated.append(token)
        cursor.advance(generated, 1, 0)
    assert cursor.propose(1000) == draft[6:14]
    generated += draft[6:15]
    cursor.advance(generated, 9, 8)
    assert cursor.num_accepted == 2 + 9
    assert cursor.propose(1000) == draft[15:31]
    assert PredictionCursor([]).propose(5) == []
