"""Structured output through the engine: random schemas under random weights, alone and with everything else."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import random_schema
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest, Resumption
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.grammars.state import GrammarState
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-large"
PADDED = 1059  # the model's vocabulary, beyond the tokenizer's 1024
Result = Any


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(POCKET)


@pytest.fixture(scope="module")
def engine_of(make_llama: Any, tokenizer: Tokenizer) -> Callable[..., Engine]:
    models = [make_llama(seed, vocab_size=PADDED, context_length=448) for seed in (0, 1)]

    def make(*, drafts: bool = False, eos: bool = True, **config: Any) -> Engine:
        served = ServedModel(models[0], tokenizer=tokenizer, eos_ids=tokenizer.eos_ids if eos else frozenset())
        options = {"max_num_seqs": 32, "max_waiting": 2000, "max_num_batched_tokens": 1024, **config}
        return Engine(served, EngineConfig(**options), draft=DraftWeights(models[1]) if drafts else None)

    return make


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), "response_format")


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern, "structured_outputs")


def request(
    name: str, constraint: Constraint | None, *, n: int = 1, draft: Sequence[int] = (), **params: Any
) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": 64, "temperature": 1.0, "seed": 7, **params})
    return GenerationRequest(name, [5, 7, 9], sampling, list(draft), n=n, constraint=constraint)


def texts(results: Sequence[Result], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(result.token_ids) for result in results]


def finished_outputs_validate(engine: Engine, tokenizer: Tokenizer, run: Any, seeds: range) -> int:
    """Answers to random schemas; how many of them were finished."""
    quote = tokenizer.encode('"')[0]  # made likelier, so that strings under random weights come to an end
    schemas: list[Any] = []
    requests: list[GenerationRequest] = []
    for seed in seeds:
        made = random_schema(seed)
        params = {"max_tokens": 300, "seed": seed, "logit_bias": ((quote, 2.0),)}
        wanted = request(f"r{seed}", schema(made), **params)
        try:
            engine.prepare(wanted)
        except InvalidRequestError as error:
            assert "nsatisfiable" in error.message, error  # some random schemas contradict themselves
            continue
        schemas.append(made)
        requests.append(wanted)
    assert len(requests) >= 0.98 * len(seeds)
    finished = 0
    for made, result in zip(schemas, run(engine, requests), strict=True):
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator(
                made, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            checker.validate(json.loads(tokenizer.decode(result.token_ids)))
            finished += 1
    return finished


@pytest.mark.parametrize("drafts", [False, True])
def test_finished_answers_to_random_schemas_validate(
    engine_of: Any, tokenizer: Tokenizer, run: Any, drafts: bool
) -> None:
    count = 60 if drafts else 150
    assert finished_outputs_validate(engine_of(drafts=drafts), tokenizer, run, range(count)) > count * 0.6


@pytest.mark.soak
@pytest.mark.parametrize("drafts", [False, True])
def test_a_thousand_schemas(engine_of: Any, tokenizer: Tokenizer, run: Any, drafts: bool) -> None:
    assert finished_outputs_validate(engine_of(drafts=drafts), tokenizer, run, range(1000, 2000)) > 600


@pytest.mark.usefixtures("both_depths")
def test_drafts_and_predictions_change_nothing(engine_of: Any, tokenizer: Tokenizer, run: Any) -> None:
    """Also in a cache so small that requests are preempted, and with predictions that break the grammar midway."""
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    predictions = [
        tokenizer.encode(text) for text in ('{"name": "Ada", "age": 36}', '{"name": "Ada"} or so', "no JSON")
    ]
    constraints = [
        schema(person),
        regex("[a-f]{3,30}-[0-9]+"),
        Constraint("choice", '["red","green","blue"]', "x"),
        None,
    ]

    def answers(engine: Engine, drafts: Sequence[Sequence[int]]) -> list[Any]:
        pending = [
            request(
                f"r{i}", constraints[i % 4], seed=i, draft=drafts[i % len(drafts)], temperature=[1.0, 0.0][i // 4 % 2]
            )
            for i in range(16)
        ]
        return [(result.token_ids, result.finish_reason) for result in run(engine, pending)]

    plain = answers(engine_of(), [[]])
    assert answers(engine_of(drafts=True), [[]]) == plain
    assert answers(engine_of(), predictions) == plain
    tight = engine_of(drafts=True, num_gpu_blocks_override=14, enable_prefix_caching=False)
    assert answers(tight, predictions) == plain
    assert tight.stats().preemptions > 0


def test_a_prediction_that_fits_is_accepted_and_what_breaks_the_grammar_is_not_verified(
    engine_of: Any, tokenizer: Tokenizer, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "abcabcabc"
    engine = engine_of()
    kept = run(engine, [request("r", regex(text), draft=tokenizer.encode(text))])[0]
    assert kept.stats.accepted_prediction_tokens == kept.stats.completion_tokens
    steps = engine.stats().steps
    assert steps <= 2
    computed: list[int] = []
    compute = engine._worker.runner.compute

    def counting(batch: Any, unread: Any = None) -> Any:
        computed.extend(span.length for span in batch.sequences.spans)
        return compute(batch, unread)

    monkeypatch.setattr(engine._worker.runner, "compute", counting)
    broken = run(engine, [request("r", regex(text), draft=tokenizer.encode("abcabc, and more that is in vain"))])[0]
    assert tokenizer.decode(broken.token_ids) == text
    fitting = broken.stats.accepted_prediction_tokens
    assert 0 < fitting <= 6 and sum(computed) <= 3 + broken.stats.completion_tokens


@pytest.mark.usefixtures("both_depths")
def test_several_answers_stand_each_where_they_are(engine_of: Any, tokenizer: Tokenizer, run: Any) -> None:
    got = texts(run(engine_of(), [request("r", regex("[a-z]{1,4}[0-9]{1,4}[A-Z]"), n=6)]), tokenizer)
    assert len(set(got)) > 1
    assert all(text[-1].isupper() and text[0].islower() for text in got)


@pytest.mark.usefixtures("both_depths")
def test_end_of_an_answer(engine_of: Any, tokenizer: Tokenizer, run: Any) -> None:
    def one(constraint: Constraint, engine: Engine | None = None, **params: Any) -> tuple[str, str]:
        result = run(engine or engine_of(), [request("r", constraint, **params)])[0]
        return tokenizer.decode(result.token_ids, skip_special=False), result.finish_reason

    assert one(regex("abc")) == ("abc", "stop")
    assert one(regex("(abc){20}"), max_tokens=4)[1] == "length"
    # The grammar's end is the end, whatever else was asked for.
    assert one(regex("abc"), min_tokens=40) == ("abc", "stop")
    assert one(regex("abc"), ignore_eos=True) == ("abc", "stop")
    assert one(regex("abc"), engine_of(eos=False)) == ("abc", "stop")
    assert one(regex("a*b"), stop_token_ids=tuple(tokenizer.encode("a")), min_tokens=2)[1] == "stop"
    # But where it may go on, it does, if it must.
    likely_end = tuple((token, 100.0) for token in tokenizer.eos_ids)
    text, reason = one(regex("[a-z]*"), ignore_eos=True, max_tokens=30, logit_bias=likely_end)
    assert (reason, text.isalpha(), text.islower()) == ("length", True, True)
    text, reason = one(regex("[a-z]*"), min_tokens=20, logit_bias=likely_end)
    assert (reason, text.isalpha(), text.islower()) == ("stop", True, True)
    assert len(text) >= 20


def test_scores_are_of_the_raw_distribution(engine_of: Any, run: Any) -> None:
    [held] = run(engine_of(), [request("r", regex("x{3}"), logprobs=3, temperature=0.0)])
    assert len(held.logprobs) == len(held.token_ids)
    assert any(score.logprob < score.top[-1][1] for score in held.logprobs)


@pytest.mark.usefixtures("both_depths")
def test_penalties_and_truncation_apply_to_allowed_tokens(engine_of: Any, tokenizer: Tokenizer, run: Any) -> None:
    letters = tuple((tokenizer.encode(letter)[0], -100.0) for letter in "ab")
    options = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9}, {"typical_p": 1e-6}, {"logit_bias": letters}]
    options += [{"frequency_penalty": 2.0, "repetition_penalty": 2.0}]
    pending = [request(f"r{i}", regex("[ab]{5}"), **option) for i, option in enumerate(options)]
    assert all(len(text) == 5 and set(text) <= {"a", "b"} for text in texts(run(engine_of(), pending), tokenizer))


def outputs(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, list[TokenOutput]]:
    outputs_of: dict[str, list[TokenOutput]] = {pending.request_id: [] for pending in requests}
    for pending in requests:
        engine.add_request(pending)
    while engine.has_work:
        for output in engine.step():
            outputs_of[output.request_id].append(output)
    return outputs_of


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("drafts", [False, True])
def test_a_dead_end_is_an_error_of_its_request_alone(engine_of: Any, tokenizer: Tokenizer, drafts: bool) -> None:
    """Every way on is forbidden by another option; and a grammar that becomes too dear on the way."""
    only = tuple(tokenizer.encode("a"))
    pending = [
        request("dead", regex("a{9}"), stop_token_ids=only, min_tokens=5),
        request("dear", regex("[b-d]{9}(?:a?){5000}a{5000}")),
        request("good", regex("[a-c]{30}")),
        request("free", None),
    ]
    engine = engine_of(drafts=drafts)
    outputs_of = outputs(engine, pending)
    last = outputs_of["dead"][-1]
    assert (last.finish_reason, last.token_ids) == ("error", [])
    assert "allow no token" in (last.error or "")
    dear_end = outputs_of["dear"][-1]
    assert "too complex" in (dear_end.error or "")
    good = tokenizer.decode([token for output in outputs_of["good"] for token in output.token_ids])
    assert len(good) == 30 and outputs_of["good"][-1].finish_reason == "stop"
    assert sum(len(output.token_ids) for output in outputs_of["free"]) == 64
    assert engine.stats().kv_blocks_used == 0


def test_refused_before_it_is_queued(engine_of: Any, make_engine: Any) -> None:
    engine = engine_of()
    for constraint in (regex("("), schema({"not": {}}), regex("")):
        with pytest.raises(InvalidRequestError):
            engine.add_request(request("r", constraint))
    assert not engine.has_work


def test_masks_agree_with_the_grammar_walked_token_by_token(engine_of: Any, tokenizer: Tokenizer) -> None:
    """Wherever a random walk goes, back and forth, the state says what a fresh matcher says there."""
    engine = engine_of()
    constraint = schema({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}})
    chance = random.Random(0)
    for _ in range(20):
        state = engine.prepare(request("r", constraint))
        answer: list[int] = []
        while not state.complete and len(answer) < 20:
            ahead: list[int] = []
            for _ in range(chance.randint(0, 4)):
                mask = state.mask(ahead)
                if mask is None:
                    break
                ahead.append(chance.choice([t for t in range(PADDED) if mask[t // 32] >> t % 32 & 1]))
                assert ahead[-1] < tokenizer.vocab_size
            cut = ahead[: chance.randint(0, len(ahead))]
            if tokenizer.eos_ids & set(cut):
                break
            assert state.num_allowed([*cut, PADDED - 1]) == len(cut)
            taken = state.advance(cut)
            answer += cut[:taken]
            fresh = engine.prepare(request("r", constraint))
            assert fresh.advance(answer) == len(answer)
            left, right = state.mask([]), fresh.mask([])
            assert (left is None) == (right is None) == state.complete
            assert left is None or right is None or (left == right).all()


def test_a_grammar_that_raises_ends_its_answer_only(engine_of: Any, run: Any, monkeypatch: Any) -> None:
    requests = [request(f"r{i}", regex("[a-z]{40}") if i % 2 else None, seed=i, n=1 + i % 3) for i in range(6)]
    bad = request("bad", Constraint("regex", "[a-z]{40}", "poison"), n=2)
    expected = [result.token_ids for result in run(engine_of(), requests)]
    healthy = GrammarState.advance

    def advance(state: GrammarState, tokens: Sequence[int]) -> int:
        if state.param == "poison":
            raise RuntimeError("a bug in the matcher")
        return healthy(state, tokens)

    monkeypatch.setattr(GrammarState, "advance", advance)
    engine = engine_of()
    results = run(engine, [*requests, bad])
    assert [result.token_ids for result in results[: len(expected)]] == expected
    assert [result.finish_reason for result in results[len(expected) :]] == ["error", "error"]
    assert engine.stats().preemptions == 0


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("options", [{}, {"ngram": True}, {"enable_prefix_caching": False}])
def test_answers_continue_from_any_token(engine_of: Any, run: Any, options: dict[str, Any]) -> None:
    """As after a failure: with and without constraints, several answers, penalties and predictions."""
    constraints = [None, regex("[a-z ]{30}[0-9]{10}"), schema({"type": "array", "items": {"type": "integer"}})]
    for number, constraint in enumerate(constraints):
        asked = request("r", constraint, n=3, draft=[5, 6, 7, 8, 9], presence_penalty=float(number), logprobs=1)
        whole = [(result.token_ids, result.finish_reason) for result in run(engine_of(**options), [asked])]
        for cut in (0, 1, 7, 20):
            begun = {index: ids[:cut] for index, (ids, _) in enumerate(whole) if len(ids) > cut and index != cut % 3}
            if not begun:  # all of these answers are shorter
                continue
            engine = engine_of(**options)
            engine.add_request(dataclasses.replace(asked, resumed=Resumption(begun)))
            ends: dict[int, str | None] = {}
            while engine.has_work:
                for output in engine.step():
                    begun[output.index] = begun[output.index] + output.token_ids
                    ends[output.index] = output.finish_reason
            assert {index: (ids, ends[index]) for index, ids in begun.items()} == {i: whole[i] for i in begun}
