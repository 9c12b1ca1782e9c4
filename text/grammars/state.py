"""Grammar state of one answer: masks of the tokens allowed next, also after draft tokens.

The matcher consumes draft tokens speculatively and is rolled back if the model rejects them. The draft model thus
samples under the same masks as the target model, and acceptance works as without a grammar.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...protocol.errors import InvalidRequestError
from ...protocol.structured import Constraint
from .compiler import GrammarCompiler, end_ids

if TYPE_CHECKING:
    import llguidance

Mask = npt.NDArray[np.int32]  # bit set of allowed token ids, 32 per word, lowest bit first


class Grammars:
    """Factory of grammar states for one model. Thread-safe."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_ids: Iterable[int], *, num_tokens: int | None = None
    ) -> None:
        """`vocab_size`: rows of the output head; `num_tokens`: tokens of the tokenizer, None for the same number."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._end_ids = end_ids(self._eos_ids, vocab_size if num_tokens is None else num_tokens)

    def begin(self, constraint: Constraint, *, ignore_eos: bool) -> GrammarState:
        """Return the state of a new answer. Compiles the constraint, with the errors of `GrammarCompiler.compile`."""
        matcher = self._compiler.compile(constraint)
        endless = ignore_eos or not self._eos_ids
        state = GrammarState(matcher, self._vocab_size, self._end_ids, constraint.param, endless=endless)
        if state.error or state.complete:
            why = state.error or "the constraint allows only an empty answer."
            raise InvalidRequestError(f"{constraint.param}: {why}", param=constraint.param, code="invalid_grammar")
        return state


class GrammarState:
    """Grammar state of one answer. `param` is the request field that the grammar came from.

    `complete`: only the end of the answer may follow. `error`: reason why the answer cannot continue, such as an
    exceeded cost limit or a token missing in the vocabulary; the rest of the state is then meaningless.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, eos_ids: Sequence[int], param: str, *, endless: bool
    ) -> None:
        """`vocab_size`: rows of the output head; `endless`: forbid the answer's end while other tokens are allowed."""
        self.param = param
        self.complete = False
        self.error: str | None = None
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._going_on = ~_bits(eos_ids, self._num_words)
        self._endless = endless
        self._ahead: list[int] = []  # draft tokens that the matcher has consumed beyond the answer so far
        self._masks: list[Mask | None] = []  # mask after the first k draft tokens, at index k
        self._settle()

    def fork(self) -> GrammarState:
        """Return an independent copy of the state, without draft tokens."""
        self._rewind(0)
        twin = copy.copy(self)
        twin._matcher, twin._ahead, twin._masks = self._matcher.deep_copy(), [], list(self._masks)
        return twin

    def mask(self, drafts: Sequence[int]) -> Mask | None:
        """Return the mask after `drafts`; None if the grammar rejects a draft token or requires the end."""
        return self._mask_after(len(drafts)) if self.num_allowed(drafts) == len(drafts) else None

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return the number of leading `drafts` that the grammar allows."""
        shared = _common_length(self._ahead, drafts)
        if shared < len(drafts):
            self._rewind(shared)
        for token in drafts[shared:]:
            if not _allows(self._mask_after(len(self._ahead)), token):
                break
            self._matcher.consume_token(token)
            self._ahead.append(token)
        return min(len(self._ahead), len(drafts))

    def advance(self, tokens: Sequence[int]) -> int:
        """Append `tokens` to the answer; return how many were accepted. A complete grammar accepts no more tokens."""
        taken = self.num_allowed(tokens)
        if taken < len(tokens) and (taken == 0 or self._mask_after(taken) is not None):
            self.give_up()
        self._rewind(taken)
        self._ahead, self._masks = [], self._masks[taken:]
        self._settle()
        return taken

    def give_up(self) -> None:
        """Fail the answer, because other options exclude all tokens that the grammar allows."""
        self.error = self.error or "the grammar and the other options together allow no token."

    def failure(self) -> InvalidRequestError:
        """Return `error` as an exception for the caller."""
        return InvalidRequestError(f"{self.param}: {self.error}", param=self.param, code="grammar_failed")

    def _settle(self) -> None:
        """Update `complete` and `error` for the current position."""
        if self._mask_after(0) is None and self.error is None:
            self.complete = self._matcher.is_accepting() or self._matcher.is_stopped()
            if not self.complete:
                self.error = "this model has no token that continues the answer according to the grammar."

    def _rewind(self, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` draft tokens."""
        if num_tokens < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - num_tokens)
            del self._ahead[num_tokens:], self._masks[num_tokens + 1 :]

    def _mask_after(self, num_ahead: int) -> Mask | None:
        """Return the mask after `num_ahead` draft tokens, from the cache if it was computed before."""
        if num_ahead == len(self._masks):
            self._masks.append(self._computed())
        return self._masks[num_ahead]

    def _computed(self) -> Mask | None:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return None
        raw = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self._num_words]
        if self._matcher.is_error():
            self.error = f"the grammar is too complex ({self._matcher.stop_reason()}): simplify it."
            return None
        mask = np.zeros(self._num_words, dtype=np.int32)
        mask[: len(raw)] = raw
        going_on = mask & self._going_on
        if not going_on.any():
            return None
        return going_on if self._endless else mask


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _allows(mask: Mask | None, token: int) -> bool:
    return mask is not None and bool(mask[token // 32] >> (token % 32) & 1)


def _bits(token_ids: Sequence[int], num_words: int) -> Mask:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[[token for token in token_ids if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
