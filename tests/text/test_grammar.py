"""What can be a constraint, what cannot, and that the difference is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.structured import Constraint
from updraft.text.grammar import GrammarCompiler, Vocabulary
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[2] / "embedded" / "weights" / "pocket-large"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(POCKET)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids), tokenizer.encode)


def constraint(kind: Any, source: Any) -> Constraint:
    return Constraint(kind, source if isinstance(source, str) else json.dumps(source), "response_format")


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str, source: Any, text: str) -> bool:
    matcher = compiler.compile(constraint(kind, source))
    tokens = tokenizer.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (
            "json_schema",
            {"type": "object"},
            ['{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'],
            ["[1]", '{"a" : 1', "{   }"],
        ),
        ("json_schema", {"type": "integer", "minimum": 3}, ["3", "12"], ["2", "3.5", '"3"']),
        ("regex", "[a-c]{2}|x+", ["ab", "xxx"], ["a", "abc", ""]),
        ("choice", ['say "yes"', "no\n", "\\d", "日本"], ['say "yes"', "no\n", "\\d", "日本"], ["no", "7", "日"]),
        ("lark", 'start: "a" b*\nb: "b" | "c"', ["a", "abcb"], ["", "b"]),
    ],
)
def test_holds_text_to_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str, source: Any, good: list[str], bad: list[str]
) -> None:
    assert all(accepts(compiler, tokenizer, kind, source, text) for text in good)
    assert not any(accepts(compiler, tokenizer, kind, source, text) for text in bad)


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", {"type": "elephant"}, "elephant"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
        ("json_schema", {"if": {"type": "string"}, "then": False}, "if"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("json_schema", {"type": "string", "format": "elephant"}, "elephant"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "regex"),
        ("json_schema", {"$ref": "http://localhost/schema.json"}, "not present"),
        ("json_schema", {"$ref": "#"}, "json schema"),
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ("json_schema", "{", "not a JSON schema"),
        ("json_schema", "[1]", "not a JSON schema"),
        ("regex", "(a", "unclosed|invalid regex"),
        ("lark", "start: elephant", "elephant"),
        ("lark", "", "Empty"),
    ],
)
def test_what_it_cannot_hold_an_answer_to_is_refused(
    compiler: GrammarCompiler, kind: str, source: Any, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        compiler.compile(constraint(kind, source))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_grammar")
    assert len(caught.value.message) < 700


def test_text_matches_no_control_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(constraint("regex", "(.|\n)*"))
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(mask[: tokenizer.vocab_size]).tolist())
    assert tokenizer.special_ids & allowed == tokenizer.eos_ids


def test_forced_text_is_tokenized_as_the_model_is_used_to(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(constraint("lark", 'start: "the answer is " /[0-9]/'))
    assert matcher.compute_ff_tokens() == tokenizer.encode("the answer is ")[: len(matcher.compute_ff_tokens())] != []


def test_a_matcher_is_the_callers_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = (compiler.compile(constraint("regex", "ab")) for _ in range(2))
    assert first.consume_tokens(tokenizer.encode("ab"))
    assert first.is_accepting() and not second.is_accepting()
