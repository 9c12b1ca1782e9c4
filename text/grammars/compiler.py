"""Grammars: from what an answer must look like to a matcher that says, token by token, what may come next.

The work is llguidance's: a lazy regular-expression lexer under an Earley parser, walked over the trie of the
vocabulary. This file decides what is asked of it: the whitespace of JSON, how much a grammar may cost, and that what
it cannot hold an answer to is refused.
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
from .json_schema import InexactError, essential

try:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark
except ImportError as error:
    raise MissingDependencyError(
        "Structured output needs llguidance: pip install '.[edge]' or '.[cloud]' in a clone of Updraft"
    ) from error

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One space, or a line break and its indentation: without a bound a model can write blanks until its answer is full.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r" |\n {0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
Encode = Callable[[str], list[int]]
_MAX_LEXER_STATES = 20_000  # about 2 kB each
_TRIAL_TOKENS = 8
_TOKEN_CPU_SECONDS = 2.5e-3  # spent in every step for every answer, beside all others; usual grammars take a tenth
_FORCED_BYTES = 512  # tokenized ahead; only the first token of forced text is asked for
_MAX_KEPT = 64  # compiled grammars


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id, in order; which ids are special, so that no text matches them; which end answers."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @staticmethod
    def of(tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Vocabulary:
        tokens = [tokenizer.token_bytes(token_id, skip_special=False) for token_id in range(tokenizer.vocab_size)]
        return Vocabulary(tokens, sorted(tokenizer.special_ids), sorted(eos_ids))


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Thread-safe; what was compiled last is kept.

    `encode` tokenizes text as the model is used to; without it a matcher is good for checking a constraint only.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], encode: Encode | None = None) -> None:
        """`vocabulary` is read with the first constraint: a large one takes a second, and not every server needs it."""
        self._lock = threading.Lock()
        self._vocabulary = vocabulary
        self._encode = encode
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: BoundedCache[Constraint, llguidance.LLMatcher] = BoundedCache(_MAX_KEPT)

    def compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        """A matcher at its beginning, the caller's own.

        Raises InvalidRequestError for a constraint that is wrong, too dear in every token, or that no answer can be
        held to. Takes as long as the constraint wants: see `grammar_check` for those of strangers.
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
            raise _refused(constraint, _explained(error, constraint.param))
        trial = matcher.deep_copy()
        spent = _tried(trial)
        if error := trial.get_error():
            raise _refused(constraint, _first_line(error))
        if spent > _TOKEN_CPU_SECONDS:
            why = f"every token takes {spent * 1e3:.1f} ms, more than {_TOKEN_CPU_SECONDS * 1e3:g} ms"
            raise too_complex(constraint, f"{why}: shorten its fixed texts, or simplify it.")
        if matcher.is_stopped():
            raise _refused(constraint, "no answer but an empty one, or none at all, could match.")
        return matcher


def grammar_of(constraint: Constraint) -> str:
    """The constraint as llguidance takes it. Raises InvalidRequestError for what is not JSON where it must be."""
    if constraint.kind == "json_schema":
        try:
            schema = json.dumps(essential(json.loads(constraint.source)))
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except (ValueError, RecursionError) as error:
            raise _refused(constraint, f"not a JSON schema ({error}).") from error
        except InexactError as error:
            raise _refused(constraint, f"{error}.") from error
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(constraint.source))
    return llguidance.LLMatcher.grammar_from_lark(_lark(constraint))


def _lark(constraint: Constraint) -> str:
    if constraint.kind == "lark":
        return constraint.source
    try:
        return gbnf_to_lark(constraint.source)
    except Exception as error:  # it raises nothing more exact
        raise _refused(constraint, f"{error}"[:500]) from error


def end_ids(eos_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids that a matcher takes for the end. A vocabulary without an end gets a made-up id behind its last token."""
    return sorted(eos_ids) or [vocab_size]


def inline_schema(schema: dict[str, Any]) -> str:
    """A JSON schema as a part of a Lark grammar; `$ref` in it starts from its own root. Raises InvalidRequestError."""
    try:
        return "%json " + json.dumps({**essential(schema), "x-guidance": JSON_OPTIONS})
    except InexactError as error:
        raise InvalidRequestError(f"tools: {error}.", param="tools", code="invalid_grammar") from error


def _trie(vocabulary: Vocabulary, encode: Encode | None) -> llguidance.LLTokenizer:
    """llguidance's tokenizer, with the trie of all tokens' bytes."""
    ends = end_ids(vocabulary.eos_ids, len(vocabulary.tokens))
    tokens = vocabulary.tokens if vocabulary.eos_ids else [*vocabulary.tokens, b"<end>"]
    wrapper = _Wrapper(tokens, sorted({*vocabulary.special_ids, *ends}), ends[0], encode)
    return llguidance.LLTokenizer(wrapper, eos_token=ends)  # pyright: ignore[reportArgumentType]


class _Wrapper:
    """The tokenizer interface of llguidance. Text forced by a grammar is allowed only as this tokenizes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int, encode: Encode | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id
        self._encode = encode
        self._most = _FORCED_BYTES + 2 * max(map(len, tokens))  # llguidance leaves the last tokens open
        self._byte_ids = {token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        raw = _beginning(text.encode() if isinstance(text, str) else text, self._most)
        ids = [] if self._encode is None else self._encode(raw.decode("utf-8", "replace"))
        if b"".join(self.tokens[token_id] for token_id in ids) == raw:
            return ids
        return [self._byte_ids[byte] for byte in raw if byte in self._byte_ids]  # SentencePiece puts a blank in front


def _beginning(raw: bytes, most: int) -> bytes:
    """At most `most` bytes of UTF-8, and no part of a character."""
    end = most
    while most - 3 < end < len(raw) and raw[end] & 0xC0 == 0x80:
        end -= 1
    return raw[:end]


def _tried(matcher: llguidance.LLMatcher) -> float:
    """Walk a few tokens, as some limits are met only in use; then the matcher has an error. Seconds of CPU time that a
    token takes: the median, behind the first one, which builds what the others find; 0 where no other follows."""
    spent: list[float] = []
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_stopped():
            break
        started = time.thread_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if allowed:
            matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the first of them
        spent.append(time.thread_time() - started)
        if not allowed:
            break
    return statistics.median_low(spent[1:] or [0.0])


def _explained(message: str, param: str) -> str:
    """The reason why llguidance refuses a constraint, with the remedy for the usual causes."""
    relax = "" if param == "structured_outputs" else ", or set strict to false to have it ignored"
    if unknown := re.search(r"Unimplemented keys: \[(.*?)\]", message):
        words = unknown[1].replace('"', "")
        return f"no grammar can hold an answer to {words}: leave it out{relax}."
    if re.search("lookarounds|look-around|backreferences", message):
        return f"no grammar can look around, or back, as its pattern does: write it without{relax}."
    return _first_line(message)


def _first_line(message: str) -> str:
    return message.partition("\n")[0].partition(" <non-verbose/>")[0][:500]


def too_complex(constraint: Constraint, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{constraint.param}: {why}", param=constraint.param, code="grammar_too_complex")


def _refused(constraint: Constraint, why: str) -> InvalidRequestError:
    what = "parameters of a function" if constraint.param == "tools" else f"the {constraint.kind.replace('_', ' ')}"
    return InvalidRequestError(
        f"{constraint.param}: {what} cannot be used: {why}", param=constraint.param, code="invalid_grammar"
    )
