"""Compiler from constraints to llguidance matchers, which compute the tokens allowed next.

llguidance runs a lazy regular-expression lexer and an Earley parser over the trie of the vocabulary.
"""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protocol.errors import InvalidRequestError, MissingDependencyError
from ...protocol.safety.bounded_cache import BoundedCache
from ...protocol.structured import Constraint
from ..tokenizer import Tokenizer
from .json_schema import InexactError, normalized

try:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark
except ImportError as error:
    raise MissingDependencyError(
        "Structured output needs llguidance: pip install '.[edge]' or '.[cloud]' in a clone of Updraft"
    ) from error

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Whitespace in JSON: one space, or a line break with indentation. Bounded, so that no model fills its answer with it.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r" |\n {0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
Encode = Callable[[str], list[int]]
_MAX_LEXER_STATES = 20_000  # about 40 MB, at 2 kB per state
_TRIAL_TOKENS = 8
_TOKEN_CPU_SECONDS = 2.5e-3  # limit per token; usual grammars take a tenth of this time
_FORCED_BYTES = 512  # maximum bytes of grammar-forced text to tokenize, because only the first token is used
_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_MAX_KEPT = 64  # maximum number of cached grammars


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes of every token in id order, special ids (which no text matches), and ids that end an answer."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @staticmethod
    def of(tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Vocabulary:
        tokens = [tokenizer.token_bytes(token_id, skip_special=False) for token_id in range(tokenizer.vocab_size)]
        return Vocabulary(tokens, sorted(tokenizer.special_ids), sorted(eos_ids))


class GrammarCompiler:
    """Thread-safe compiler for one vocabulary, with a cache of recent constraints."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], encode: Encode | None = None) -> None:
        """Create a compiler. The first constraint calls `vocabulary`, since building a large vocabulary takes a second.

        `encode` is the model's tokenizer; without `encode`, matchers can only be used to check constraints.
        """
        self._lock = threading.Lock()
        self._vocabulary = vocabulary
        self._encode = encode
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: BoundedCache[Constraint, llguidance.LLMatcher] = BoundedCache(_MAX_KEPT)

    def compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        """Return a new matcher in its initial state.

        Raises InvalidRequestError if the constraint is invalid, too expensive per token, or cannot be enforced. The
        time is unbounded: check untrusted constraints with `GrammarCheck` first.
        """
        matcher = self._kept.find(constraint, self._compiled)
        with self._lock:
            return matcher.deep_copy()

    def _compiled(self, constraint: Constraint) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = _trie(self._vocabulary(), self._encode)
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0, limits=limits)
        if error := matcher.get_error():
            raise _refused(constraint, _reason_of(error, constraint.param))
        trial = matcher.deep_copy()
        spent = _tried(trial)
        if error := trial.get_error():
            raise _refused(constraint, _reason_of(error, constraint.param))
        if spent > _TOKEN_CPU_SECONDS:
            why = f"each token takes {spent * 1e3:.1f} ms to check, more than {_TOKEN_CPU_SECONDS * 1e3:g} ms"
            raise complexity_error(constraint, f"{why}: shorten fixed texts, or simplify the constraint.")
        if matcher.is_stopped():
            raise _refused(constraint, "the constraint allows no answer, or only an empty one.")
        return matcher


def grammar_of(constraint: Constraint) -> str:
    """Convert a constraint to llguidance's format. Raises InvalidRequestError for an invalid JSON schema or GBNF."""
    if constraint.kind == "json_schema":
        try:
            schema = json.dumps(normalized(json.loads(constraint.source)))
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except (ValueError, RecursionError) as error:
            raise _refused(constraint, f"the source is not a JSON schema ({error}).") from error
        except InexactError as error:
            raise _refused(constraint, f"{error}.") from error
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "choice":
        return f"start: CHOICE\nCHOICE: {inline(constraint)}"
    try:
        lark = gbnf_to_lark(constraint.source) if constraint.kind == "gbnf" else constraint.source
    except Exception as error:  # the converter raises no more specific type
        raise _refused(constraint, f"{error}"[:500]) from error
    return llguidance.LLMatcher.grammar_from_lark(lark)


def end_ids(eos_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the ids that end an answer. Without such ids, return an unused id, because llguidance needs an end id."""
    return sorted(eos_ids) or [vocab_size]


def inline(constraint: Constraint) -> str:
    """Convert a JSON schema, choice or regex to an expression of a Lark grammar. Raises InvalidRequestError."""
    if constraint.kind == "json_schema":
        try:
            return inline_schema(json.loads(constraint.source))
        except (ValueError, RecursionError) as error:
            raise _refused(constraint, f"the source is not a JSON schema ({error}).") from error
    if constraint.kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(constraint.source))
    pattern = _ESCAPE_OR_SLASH.sub(lambda part: part[0] if len(part[0]) > 1 else r"\/", constraint.source)
    return f"/{pattern}/"


def inline_schema(schema: dict[str, Any]) -> str:
    """Embed a JSON schema in a Lark grammar; `$ref` is relative to the schema's root. Raises InvalidRequestError."""
    try:
        return "%json " + json.dumps({**normalized(schema), "x-guidance": JSON_OPTIONS})
    except InexactError as error:
        raise InvalidRequestError(f"tools: {error}.", param="tools", code="invalid_grammar") from error


def _trie(vocabulary: Vocabulary, encode: Encode | None) -> llguidance.LLTokenizer:
    """Build llguidance's tokenizer, with the trie of all tokens."""
    ends = end_ids(vocabulary.eos_ids, len(vocabulary.tokens))
    tokens = vocabulary.tokens if vocabulary.eos_ids else [*vocabulary.tokens, b"<end>"]
    wrapper = _Wrapper(tokens, sorted({*vocabulary.special_ids, *ends}), ends[0], encode)
    return llguidance.LLTokenizer(wrapper, eos_token=ends)  # pyright: ignore[reportArgumentType]


class _Wrapper:
    """Tokenizer interface for llguidance. `__call__` tokenizes text that a grammar forces."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int, encode: Encode | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id
        self._encode = encode
        self._most = _FORCED_BYTES + 2 * max(map(len, tokens))  # llguidance ignores the last two tokens
        self._byte_ids = {token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        raw = _beginning(text.encode() if isinstance(text, str) else text, self._most)
        ids = [] if self._encode is None else self._encode(raw.decode("utf-8", "replace"))
        if b"".join(self.tokens[token_id] for token_id in ids) == raw:
            return ids
        return [self._byte_ids[byte] for byte in raw if byte in self._byte_ids]  # needed if `encode` adds a space


def _beginning(raw: bytes, most: int) -> bytes:
    """Return at most `most` bytes of UTF-8, without splitting a character."""
    end = most
    while most - 3 < end < len(raw) and raw[end] & 0xC0 == 0x80:
        end -= 1
    return raw[:end]


def _tried(matcher: llguidance.LLMatcher) -> float:
    """Consume a few tokens and return the median CPU time per token, in seconds; 0 for fewer than two tokens.

    The first token does not count, because it fills caches. Exceeding a limit of llguidance sets the matcher's error.
    """
    spent: list[float] = []
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_stopped():
            break
        started = time.thread_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if allowed:
            matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the lowest allowed id
        spent.append(time.thread_time() - started)
        if not allowed:
            break
    return statistics.median_low(spent[1:] or [0.0])


def _reason_of(message: str, param: str) -> str:
    """Convert llguidance's error to a reason, with a remedy for common causes."""
    relax = "" if param == "structured_outputs" else ", or set strict to false to ignore it"
    if unknown := re.search(r"Unimplemented keys: \[(.*?)\]", message):
        words = unknown[1].replace('"', "")
        return f"{words} cannot be enforced: leave it out{relax}."
    if re.search("lookarounds|look-around|backreferences", message):
        return f"a pattern with lookaround or backreferences cannot be enforced: rewrite the pattern{relax}."
    if "NoExtensionBias" in message:
        return "a reference leads back to itself, and describes no value on its way: remove this cycle."
    cause = re.search(r"\nerror: (.*)", message)  # the first line repeats the regex
    return _first_line(message) + (f" {cause[1][:100]}" if cause else "")


def _first_line(message: str) -> str:
    return message.partition("\n")[0].partition(" <non-verbose/>")[0][:500]


def complexity_error(constraint: Constraint, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{constraint.param}: {why}", param=constraint.param, code="grammar_too_complex")


def _refused(constraint: Constraint, why: str) -> InvalidRequestError:
    what = "parameters of a function" if constraint.param == "tools" else f"the {constraint.kind.replace('_', ' ')}"
    fault = f"{constraint.param}: {what} cannot be used: {why}"
    return InvalidRequestError(fault, param=constraint.param, code="invalid_grammar")
