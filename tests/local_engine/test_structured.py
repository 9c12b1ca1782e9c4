"""Structured output on the device: answers keep to their constraint, and are the cloud's where the logits agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from plain_sampling import SamplingRow, plain_edits, sample
from schemas import random_schema
from updraft.local_engine.engine import LocalEngine, LocalOptions, LocalRun
from updraft.local_engine.sampling.row_sampler import RowSampler
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint, Function, Tool, ToolUse
from updraft.text.grammars.compiler import GrammarCompiler, Vocabulary
from updraft.text.grammars.state import Grammars
from updraft.text.tokenizer import Tokenizer

WEIGHTS = Path(__file__).resolve().parents[2] / "embedded" / "weights"
ASK = [Message(role="user", content="Extract as JSON: Ada is 36.")]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine.load(WEIGHTS / "pocket-small.gguf", LocalOptions(tool_call_parser="hermes")) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(WEIGHTS / "pocket-small")


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), "response_format")


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern, "structured_outputs")


def run(engine: LocalEngine, constraint: Constraint | None, **params: Any) -> LocalRun:
    """A run to its end."""
    sampling = SamplingParams(**{"max_tokens": 64, "temperature": 1.0, "seed": 7, **params})
    answer = engine.start(ASK, sampling, constraint=constraint)
    assert "".join(token.text for token in answer) == answer.text
    return answer


#: Strings of a tiny model go on for ever; what it has written becomes less likely.
ENDING: dict[str, Any] = {"max_tokens": 300, "frequency_penalty": 0.5}


def finished_answers_validate(engine: LocalEngine, seeds: range) -> int:
    """Answers to random schemas; how many of them were finished."""
    [quote] = engine.encode('"')  # made likelier, so that strings come to an end
    finished = 0
    for seed in seeds:
        made = random_schema(seed)
        try:
            answer = run(engine, schema(made), seed=seed, logit_bias=((quote, 2.0),), **ENDING)
        except InvalidRequestError as error:
            assert "nsatisfiable" in error.message, error  # some random schemas contradict themselves
            continue
        if answer.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(made, format_checker=checker).validate(json.loads(answer.text))
            finished += 1
    return finished


def test_finished_answers_to_random_schemas_validate(engine: LocalEngine) -> None:
    assert finished_answers_validate(engine, range(50)) > 30


@pytest.mark.soak
def test_five_hundred_schemas(engine: LocalEngine) -> None:
    assert finished_answers_validate(engine, range(2000, 2500)) > 300


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (regex("[a-f]{4}-[0-9]{2}"), "[a-f]{4}-[0-9]{2}"),
        (Constraint("choice", '["yes, sir", "nö"]', "structured_outputs"), "yes, sir|nö"),
        (Constraint("lark", 'start: "(" start ")" | "x"', "structured_outputs"), r"\(*x\)*"),
    ],
    ids=["regex", "choice", "lark"],
)
def test_regex_choice_and_grammar(engine: LocalEngine, constraint: Constraint, pattern: str) -> None:
    for options in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.5}, {"seed": 3, "top_k": 1}):
        answer = run(engine, constraint, **options)
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason in ("stop", "length")


def test_end_of_an_answer(engine: LocalEngine) -> None:
    def one(constraint: Constraint, **params: Any) -> tuple[str, str | None]:
        answer = run(engine, constraint, **params)
        return answer.text, answer.finish_reason

    assert one(regex("abc")) == ("abc", "stop")
    assert one(regex("(abc){20}"), max_tokens=4)[1] == "length"
    assert one(regex("abc"), min_tokens=40) == ("abc", "stop")
    assert one(regex("abc"), ignore_eos=True) == ("abc", "stop")
    [a] = engine.encode("a")
    assert one(regex("a*b"), stop_token_ids=(a,), min_tokens=2)[1] == "stop"
    with pytest.raises(InvalidRequestError, match="allow no token") as caught:
        one(regex("a{9}"), stop_token_ids=(a,), min_tokens=5)
    assert (caught.value.param, caught.value.code) == ("structured_outputs", "grammar_failed")
    with pytest.raises(InvalidRequestError, match="too complex"):
        one(regex("[b-d]{9}(?:a?){5000}a{5000}"))
    assert one(regex("abc")) == ("abc", "stop")  # the engine goes on


@pytest.mark.parametrize("constraint", [regex("(a"), schema({"not": {}}), regex("")], ids=str)
def test_invalid_constraints_are_refused_at_the_start(engine: LocalEngine, constraint: Constraint) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.start(ASK, SamplingParams(), constraint=constraint)
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "constraint", [schema(PERSON), regex("[a-f]{3,9}[0-9]+x"), None], ids=["json", "regex", "free"]
)
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "frequency_penalty": 1.3}, {"temperature": 0.0}], ids=str)
def test_the_cloud_would_have_chosen_the_same_tokens(
    engine: LocalEngine, tokenizer: Tokenizer, constraint: Constraint | None, options: dict[str, Any]
) -> None:
    """Its sampler, its grammars over its own tokenizer, and what the device has seen, which `score` gives up to a
    constant that matters to nothing here.
    """
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 40, **options})
    resolved = params.resolved(engine.sampling_defaults)
    prompt = engine.encode_chat(ASK)
    assert prompt == tokenizer.encode_chat(ASK)
    device = engine.start(ASK, params, constraint=constraint)
    for _ in device:
        pass
    ends = frozenset(engine.vocabulary().eos_ids)
    grammars = Grammars(GrammarCompiler(lambda: Vocabulary.of(tokenizer, ends), tokenizer.encode), 1024, ends)
    state = constraint and grammars.begin(constraint, ignore_eos=False)
    logits = torch.from_numpy(engine.score(prompt + device.token_ids))
    for index, token in enumerate(device.token_ids):
        answer = device.token_ids[:index]
        edits = plain_edits(resolved, prompt, answer, ends)
        mask = None if state is None else state.mask(())
        row = SamplingRow(5, len(prompt) + index, resolved, edits, mask)
        assert sample(logits[len(prompt) + index - 1][None], [row]) == [token]
        assert state is None or state.advance([token]) == 1
    assert state is None or state.complete == (device.finish_reason == "stop")


def test_tools_are_shown_to_the_model_and_called(engine: LocalEngine) -> None:
    tools = [Tool("function", Function("now")), Tool("function", Function("person", parameters=PERSON))]
    assert engine.tool_format is not None
    use = ToolUse(tools, "required", parallel=False)
    constraint = engine.tool_format.constraint(use)
    answer = engine.start(ASK, SamplingParams(seed=1, max_tokens=200), tools=use, constraint=constraint)
    text = "".join(token.text for token in answer)
    call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    assert call is not None and json.loads(call[1])["name"] in ("now", "person")


def test_the_format_of_tool_calls_comes_from_the_template_or_the_options(engine: LocalEngine) -> None:
    assert engine.tool_format is not None and engine.tool_format.name == "hermes"
    with LocalEngine.load(WEIGHTS / "pocket-small.gguf") as plain:
        assert plain.tool_format is None  # its template knows no tools
    with pytest.raises(ConfigurationError, match="tool_call_parser"):
        LocalEngine.load(WEIGHTS / "pocket-small.gguf", LocalOptions(tool_call_parser="xml"))


def test_no_text_matches_a_control_token(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    vocabulary = engine.vocabulary()
    assert vocabulary.special_ids == sorted(tokenizer.special_ids)
    assert vocabulary.tokens == Vocabulary.of(tokenizer, tokenizer.eos_ids).tokens


@pytest.mark.parametrize("parallel", [True, False])
def test_answer_with_one_allowed_call_ends_after_it(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """The model is made to write two."""
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>'
    script = [*engine.encode(text), next(iter(engine.vocabulary().eos_ids))]

    def choose(_self: RowSampler, _logits: Any, answer: list[int], _token: Any) -> int:
        return script[len(answer)]

    monkeypatch.setattr(RowSampler, "choose", choose)
    tools = ToolUse([Tool("function", Function("now"))], parallel=parallel)
    answer = engine.start(ASK, SamplingParams(max_tokens=200), tools=tools)
    text = "".join(token.text for token in answer)
    assert text == (text if parallel else text.partition("\n</tool_call>")[0])
    assert (answer.finish_reason, len(answer.token_ids) < len(script) - 1) == ("stop", not parallel)
