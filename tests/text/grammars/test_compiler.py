"""Valid and invalid constraints, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.structured import MAX_CONSTRAINT_CHARS, Constraint
from updraft.text.grammars.compiler import GrammarCompiler, Vocabulary, inline_schema
from updraft.text.grammars.state import Grammars
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-large"


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
        ("gbnf", 'root ::= "a" two{2} # twice\ntwo ::= [b-d] | "\\n"', ["abd", "ac\n"], ["a", "ab", "abbb"]),
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
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced: leave"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
        ("json_schema", {"if": {"type": "string"}, "then": False}, "if"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "lookaround.* strict to false"),
        ("json_schema", {"type": "string", "pattern": r"(a)\1"}, "lookaround or backreferences"),
        ("json_schema", {"$ref": "http://localhost/schema.json"}, "not present"),
        ("json_schema", {"$ref": "#"}, "json schema"),
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ("json_schema", "{", "not a JSON schema"),
        ("json_schema", "[1]", "not a JSON schema"),
        ("regex", "(a", "invalid regex.*unclosed group"),
        ("regex", "a" * 600 + "(", "unclosed group"),
        ("lark", "start: elephant", "elephant"),
        ("lark", "", "Empty"),
        ("gbnf", "root ::= elephant", "elephant"),
        ("gbnf", "start ::= [a", "input"),
        ("gbnf", 'leaf ::= "a"', "root"),
    ],
)
def test_unenforceable_grammars_are_refused(compiler: GrammarCompiler, kind: str, source: Any, says: str) -> None:
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


@pytest.mark.parametrize("words", ["a", "The quick brown fox jumps. ", "日本語のテキスト、"])
def test_of_forced_text_only_the_beginning_is_tokenized(tokenizer: Tokenizer, words: str) -> None:
    """Else a long literal costs its length in every token, for all whose answers share the step."""
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return tokenizer.encode(text)

    literal = (words * MAX_CONSTRAINT_CHARS)[: MAX_CONSTRAINT_CHARS - 100]
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids), encode)
    grammars = Grammars(compiler, tokenizer.vocab_size, tokenizer.eos_ids)
    state = grammars.begin(Constraint("choice", json.dumps([literal], ensure_ascii=False), "x"), ignore_eos=False)
    expected = tokenizer.encode(literal[:1000])[:50]
    for token in expected:
        assert state.advance([token]) == 1
    assert texts and max(map(len, texts)) < 1000
    assert all(literal.find(text) >= 0 for text in texts)  # no character is cut


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("choice", ["The quick brown fox jumps over the lazy dog. " * 40, "The quick brown fox. " * 60]),
        ("choice", ["日本語のテキスト、" * 100]),
        ("regex", "[a-z]{0,8}" + "x" * 1200 + "[0-9]"),
        ("json_schema", {"const": 'a quoted "text"\n' * 90}),
        (
            "json_schema",
            {"type": "object", "required": ["k" * 900, "b"], "properties": {"k" * 900: {"type": "integer"}}},
        ),
    ],
)
def test_masks_are_those_of_all_forced_text(
    tokenizer: Tokenizer, kind: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states():
        compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids), tokenizer.encode)
        return Grammars(compiler, tokenizer.vocab_size, tokenizer.eos_ids).begin(
            constraint(kind, source), ignore_eos=False
        )

    beginning = states()
    monkeypatch.setattr("updraft.text.grammars.compiler._FORCED_BYTES", 10**6)
    monkeypatch.setattr("updraft.text.grammars.compiler._TOKEN_CPU_SECONDS", 1.0)  # all forced text is the slow way
    whole = states()
    rng = np.random.default_rng(0)
    while (mask := whole.mask([])) is not None:
        np.testing.assert_array_equal(beginning.mask([]), mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        assert beginning.advance([token]) == whole.advance([token]) == 1
    assert beginning.complete and whole.complete


def test_grammars_with_slow_tokens_are_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.text.grammars.compiler._TOKEN_CPU_SECONDS", 0.0)
    with pytest.raises(InvalidRequestError, match=r"each token takes .* shorten") as caught:
        compiler.compile(constraint("regex", "[a-z]{30}"))
    assert (caught.value.param, caught.value.code) == ("response_format", "grammar_too_complex")


def test_a_matcher_is_the_callers_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = (compiler.compile(constraint("regex", "ab")) for _ in range(2))
    assert first.consume_tokens(tokenizer.encode("ab"))
    assert first.is_accepting() and not second.is_accepting()


OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "words",
    [
        {"title": 5, "description": None, "$comment": {}, "examples": "x", "default": {"$ref": "#/nowhere"}},
        {"deprecated": True, "readOnly": True, "writeOnly": True, "contentEncoding": "base64", "x-order": 3},
        {"nullable": True, "discriminator": {"propertyName": "a"}, "markdownDescription": "b", "$vocabulary": {}},
        {"format": "form", "uniqueItems": False, "propertyNames": {"type": "string"}, "unevaluatedProperties": True},
        {"$schema": "https://example.com/ours", "$id": "our own schema", "$dynamicAnchor": "a"},
        {"not": False, "if": {"type": "string"}, "dependentRequired": {}, "minContains": 0, "unevaluatedItems": {}},
        {"propertyNames": True, "not": {"not": {}}, "then": False, "dependentSchemas": {}, "dependencies": {}},
        {"contains": {"type": "null"}, "minContains": 0},
        {"x-guidance": {"lenient": True, "whitespace_pattern": " *"}},
    ],
)
def test_words_that_hold_to_nothing_change_nothing(
    compiler: GrammarCompiler, tokenizer: Tokenizer, words: dict[str, Any]
) -> None:
    inner = {"type": "object", "properties": {"b": {**OBJECT, **words}}, "required": ["b"]}
    for schema, form in (
        ({**OBJECT, **words}, "%s"),
        (inner, '{"b":%s}'),
        ({"type": "array", "items": inner}, '[{"b":%s}]'),
    ):
        assert accepts(compiler, tokenizer, "json_schema", schema, form % '{"a":true}')
        assert not accepts(compiler, tokenizer, "json_schema", schema, form % '{"a":1}')
        assert not accepts(compiler, tokenizer, "json_schema", schema, form % '{"a":   true}')


NAMED = {"type": "object", "properties": {"a": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (NAMED, True),
        ({**NAMED, "required": ["a"]}, True),
        ({"$defs": {"n": NAMED}, "$ref": "#/$defs/n"}, True),
        ({"anyOf": [NAMED, {"type": "null"}]}, True),
        ({"allOf": [NAMED]}, True),
        ({**NAMED, "additionalProperties": True}, False),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, False),
        ({**NAMED, "unevaluatedProperties": True}, False),
        ({**NAMED, "patternProperties": {"^b$": {"type": "integer"}}}, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["b"]}, False),
        ({"allOf": [NAMED, {"type": "object", "properties": {"b": {"type": "integer"}}}]}, False),
        ({**NAMED, "anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "integer"}}}]}, False),
    ],
)
def test_objects_that_list_their_properties_are_closed(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], *, closed: bool
) -> None:
    assert accepts(compiler, tokenizer, "json_schema", schema, '{"a":true,"b":1}') is not closed
    if "b" not in schema.get("required", ()):
        assert accepts(compiler, tokenizer, "json_schema", schema, '{"a":true}')


OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
PAIR = {"$defs": {"n": NAMED, "o": OTHER}, "allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/o"}]}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"allOf": [NAMED, OTHER]}, True),
        (PAIR, True),
        ({**NAMED, "allOf": [OTHER]}, True),
        ({**NAMED, "anyOf": [OTHER, {"properties": {"b": {"type": "integer"}, "d": {"const": 1}}}]}, True),
        ({"allOf": [NAMED, {"allOf": [OTHER, {"properties": {"d": {}}}]}]}, True),
        ({"allOf": [NAMED, {**OTHER, "additionalProperties": True}]}, False),
        ({"allOf": [NAMED, OTHER, {"required": ["c"]}]}, False),
        ({"allOf": [NAMED, OTHER, {"patternProperties": {"^c$": {}}}]}, False),
    ],
)
def test_combined_objects_have_the_properties_of_all_parts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], *, closed: bool
) -> None:
    definitions = {name: schema[name] for name in ("$defs",) if name in schema}
    for inner, form in ((schema, "%s"), ({"type": "array", "items": schema, **definitions}, "[%s]")):
        assert accepts(compiler, tokenizer, "json_schema", inner, form % '{"a":true,"b":1,"c":2}') is not closed
        if closed:
            assert accepts(compiler, tokenizer, "json_schema", inner, form % '{"a":true,"b":1}')


def test_a_definition_inside_a_combined_object_closes_its_own_objects(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    deep = {"allOf": [{"properties": {"inner": NAMED}, "required": ["inner"]}, {"properties": {"b": {}}}]}
    assert accepts(compiler, tokenizer, "json_schema", deep, '{"inner":{"a":true},"b":1}')
    assert not accepts(compiler, tokenizer, "json_schema", deep, '{"inner":{"a":true,"b":1}}')


def test_parameters_of_tools_are_closed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = f"start: {inline_schema(NAMED)}"
    assert accepts(compiler, tokenizer, "lark", grammar, '{"a":true}')
    assert not accepts(compiler, tokenizer, "lark", grammar, '{"a":true,"b":1}')


@pytest.mark.parametrize("unknown", ["path", "password", "byte", "int32", "binary", "regex", "our-own"])
def test_unknown_formats_are_annotations(compiler: GrammarCompiler, tokenizer: Tokenizer, unknown: str) -> None:
    schema = {"type": "string", "format": unknown, "maxLength": 2}
    assert accepts(compiler, tokenizer, "json_schema", schema, '"ab"')
    assert not accepts(compiler, tokenizer, "json_schema", schema, '"abc"')


@pytest.mark.parametrize("known", ["date-time", "time", "date", "duration", "email", "ipv4", "ipv6", "uuid"])
def test_known_formats_are_enforced(compiler: GrammarCompiler, tokenizer: Tokenizer, known: str) -> None:
    assert not accepts(compiler, tokenizer, "json_schema", {"type": "string", "format": known}, '"none such!"')


def test_properties_may_be_called_as_keywords_are(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    names = ["title", "description", "default", "format", "not", "x-a", "uniqueItems"]
    schema = {"type": "object", "properties": {name: {"const": name} for name in names}, "required": names}
    text = json.dumps({name: name for name in names}, separators=(",", ":"))
    assert accepts(compiler, tokenizer, "json_schema", schema, text)
    assert not accepts(compiler, tokenizer, "json_schema", schema, "{}")
    assert accepts(compiler, tokenizer, "json_schema", {"enum": [{"title": "a"}]}, '{"title":"a"}')


@pytest.mark.parametrize(
    ("least", "most"),
    [(-(2**53) + 1, 2**53 - 1), (-(2**53), 2**53), (0, 2**60), (2**53 + 2, 2**62), (0, 2**63 - 1), (-(10**18), 10**18)],
)
def test_ranges_of_integers_are_exact(compiler: GrammarCompiler, tokenizer: Tokenizer, least: int, most: int) -> None:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    accepted = [
        accepts(compiler, tokenizer, "json_schema", schema, str(at)) for at in (least - 1, least, most, most + 1)
    ]
    assert accepted == [False, True, True, False]


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1, 2**64]),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 3}, [2**53 + 2], [2**53, 2**53 + 4]),
        ({"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 4}, [2**53 + 2], [2**53, 2**53 + 4]),
        ({"minimum": 0.5, "exclusiveMaximum": 1e16}, [1, 10**16 - 2], [0, 10**16]),
        ({"maximum": 2**60 + 1}, [-5, 2**60], [2**60 + 2, 2**61]),
        ({"minimum": 2**60 + 1}, [2**60 + 256, 2**62], [2**60, -5]),
        ({"minimum": -(2**63)}, [-(2**62), 5, 2**62], [-(2**63) - 1]),
    ],
    ids=str,
)
def test_bounds_that_no_double_holds_are_kept_from_within(
    compiler: GrammarCompiler, tokenizer: Tokenizer, bounds: dict[str, Any], inside: list[int], outside: list[int]
) -> None:
    schema = {"type": "integer", **bounds}
    assert all(accepts(compiler, tokenizer, "json_schema", schema, str(at)) for at in inside)
    assert not any(accepts(compiler, tokenizer, "json_schema", schema, str(at)) for at in outside)


@pytest.mark.parametrize(
    "words",
    [
        {"const": 2**53 + 1},
        {"enum": [1, -(2**53) - 1]},
        {"const": 2**63 - 1},
        {"enum": [10**400]},
        {"minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 2},
        {"minimum": 2**64},
        {"maximum": -(10**400)},
    ],
    ids=lambda words: str(words)[:40],
)
def test_integers_that_would_be_rounded_are_refused(compiler: GrammarCompiler, words: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be enforced exactly; use integers up to 2\^53") as caught:
        compiler.compile(constraint("json_schema", {"properties": {"a": {"type": "integer", **words}}}))
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}], ids=str)
def test_a_reference_to_itself_is_refused_in_words(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="a reference leads back to itself"):
        compiler.compile(constraint("json_schema", schema))
