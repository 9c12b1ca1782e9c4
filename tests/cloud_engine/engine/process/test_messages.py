"""Everything that client and core say to each other arrives as it was sent."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.process import messages
from updraft.cloud_engine.engine.stats import EngineStats
from updraft.cloud_engine.engine.types.outputs import (
    DecodedTokens,
    PromptLogprob,
    RequestStats,
    StepOutputs,
    TokenLogprob,
    TokenOutput,
)
from updraft.cloud_engine.engine.types.request import GenerationRequest, Resumption
from updraft.protocol import errors
from updraft.protocol.errors import ContextLengthError, InvalidRequestError, UpdraftError
from updraft.protocol.http.prometheus import Distribution
from updraft.protocol.sampling import SamplingParams

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, UpdraftError)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
FLOATS = st.floats(allow_nan=False)
COUNTS = st.integers(0, 2**63 - 1)


def build(kind: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a dataclass or struct; fields that are not named get values by their type, so new ones are tried.

    NaN is not tried, as it does not equal itself."""
    hints = get_type_hints(kind).items()
    unknown = {name: FLOATS if hint is float else st.from_type(hint) for name, hint in hints}
    return st.builds(kind, **{**unknown, **known})


def chance(*bounds: float) -> st.SearchStrategy[float]:
    return st.floats(*bounds, allow_nan=False)


PARAMS = build(
    SamplingParams,
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    temperature=st.none() | chance(0, 2),
    top_p=chance(0.01, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=chance(0, 0.99),
    typical_p=chance(0.01, 1),
    repetition_penalty=chance(0.01, 2),
    frequency_penalty=chance(-2, 2),
    presence_penalty=chance(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 10**6), chance(-100, 100)), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(TEXT.filter(bool), max_size=4).map(tuple),
    stop_token_ids=TOKENS.map(tuple),
    min_tokens=st.integers(0, 100),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
REQUESTS = build(
    GenerationRequest,
    request_id=TEXT,
    prompt_ids=TOKENS,
    params=PARAMS,
    draft_ids=TOKENS,
    n=COUNTS,
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_salt=TEXT,
    random_seed=st.integers(0, 2**63 - 1),
    resumed=st.none() | st.builds(Resumption, st.dictionaries(st.integers(0, 100), TOKENS, max_size=3), COUNTS),
)
TOP = st.lists(st.tuples(COUNTS, FLOATS), max_size=3).map(tuple)
SCORES = st.lists(st.builds(TokenLogprob, FLOATS, TOP)).map(tuple)
STATS = build(
    RequestStats,
    **{field.name: COUNTS for field in dataclasses.fields(RequestStats) if field.type == "int"},
)
OUTPUTS = build(
    TokenOutput,
    request_id=TEXT,
    token_ids=TOKENS,
    logprobs=SCORES,
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    stats=st.none() | STATS,
    index=COUNTS,
    prompt_logprobs=st.lists(st.builds(PromptLogprob, FLOATS, TOP, COUNTS)).map(tuple),
    cached_tokens=COUNTS,
    embedding=st.lists(FLOATS, max_size=3).map(tuple),
)
SECONDS = st.builds(Distribution, st.just((0.1, 1.0)), st.lists(COUNTS, min_size=3, max_size=3), FLOATS)
ENGINE_STATS = build(
    EngineStats,
    seconds_since_step=FLOATS,
    queue_seconds=SECONDS,
    step_seconds=SECONDS,
    **{field.name: COUNTS for field in dataclasses.fields(EngineStats) if field.type == "int"},
)


@given(REQUESTS)
def test_a_request_arrives(request: GenerationRequest) -> None:
    command = messages.Add(request)
    assert messages.decode_command(messages.encode_command(command)) == command


DECODED = st.lists(st.tuples(TEXT, COUNTS, COUNTS), max_size=3).map(
    lambda rows: DecodedTokens([name for name, _, _ in rows], [i for _, i, _ in rows], [token for _, _, token in rows])
)


@given(st.lists(st.builds(StepOutputs, DECODED, st.lists(OUTPUTS, max_size=3)), max_size=3), ENGINE_STATS)
def test_outputs_and_counters_arrive(steps: list[StepOutputs], stats: EngineStats) -> None:
    report = messages.OutputReport(steps, stats)
    assert messages.decode_report(messages.encode_report(report)) == report


@given(st.sampled_from(ERRORS), TEXT, st.none() | TEXT, st.none() | TEXT, st.lists(TEXT, max_size=3))
def test_errors_keep_their_type(
    kind: type[UpdraftError], message: str, param: str | None, code: str | None, ids: list[str]
) -> None:
    sent = kind(message, param=param, code=code)
    for report in (messages.FailureReport(ids, sent), messages.DownReport(sent)):
        arrived = messages.decode_report(messages.encode_report(report))
        assert type(arrived) is type(report)
        assert type(arrived.error) is kind
        assert vars(arrived.error) == vars(sent)
        assert (arrived.error.to_body(), arrived.error.headers()) == (sent.to_body(), sent.headers())


@pytest.mark.parametrize(
    "command",
    [
        messages.Load("folder", None, EngineConfig(num_gpu_blocks_override=7, scheduling_policy="priority")),
        messages.Load("folder", "draft.gguf", EngineConfig()),
        messages.Abort("a"),
        messages.Close(),
    ],
)
def test_the_other_commands_arrive(command: messages.Command) -> None:
    assert messages.decode_command(messages.encode_command(command)) == command


@pytest.mark.parametrize(
    "report", [messages.LoadProgress(1, 2**40), messages.ReadyReport("m", 512), messages.AliveReport()]
)
def test_the_other_reports_arrive(report: messages.Report) -> None:
    assert messages.decode_report(messages.encode_report(report)) == report


def test_an_error_of_the_core_alone_arrives_as_its_public_kind() -> None:
    class Private(ContextLengthError):
        pass

    arrived = messages.decode_report(messages.encode_report(messages.DownReport(Private("too long"))))
    assert isinstance(arrived, messages.DownReport)
    assert type(arrived.error) is ContextLengthError


@pytest.mark.parametrize("request_", [GenerationRequest("a", [1], priority=2**70), GenerationRequest("\ud800", [1])])
def test_unencodable_values_are_request_errors(request_: GenerationRequest) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        messages.encode_command(messages.Add(request_))


@given(st.binary(max_size=60))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    for decode in (messages.decode_command, messages.decode_report):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_a_pickle_is_no_message() -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_report(pickle.dumps(messages.AliveReport()))


@pytest.mark.parametrize("kind", ["__builtins__", "ClassVar", "annotations", "Nothing", None])
def test_only_errors_are_made_from_the_name_of_an_error(kind: str | None) -> None:
    error = {"kind": kind, "message": "m", "param": None, "code": None}
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_report(msgspec.msgpack.encode({"type": "DownReport", "error": error}))
