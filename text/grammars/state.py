"""An answer's place in its grammar: the tokens that may come next, also behind draft tokens.

A draft is walked ahead of the answer and rolled back where the model decides otherwise, so that the draft model samples
under the same masks as the target, and a draft is accepted by the same rule as without a grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...protocol.errors import InvalidRequestError
from ...protocol.structured import Constraint
from .compiler import GrammarCompiler, end_ids

if TYPE_CHECKING:
    import llguidance

Mask = npt.NDArray[np.int32]  # one bit per token id, 32 to a word, lowest bit first: may this token come next?


class Grammars:
    """The grammars of one model. Thread-safe."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_ids: Iterable[int], *, num_tokens: int | None = None
    ) -> None:
        """`vocab_size`: rows of the model's head; `num_tokens`: what the tokenizer has of them, None for as many."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._end_ids = end_ids(self._eos_ids, vocab_size if num_tokens is None else num_tokens)

    def begin(self, constraint: Constraint, *, ignore_eos: bool) -> GrammarState:
        """An answer at its beginning. Takes as long as `GrammarCompiler.compile` does.

        Raises InvalidRequestError for a constraint that is wrong, or that no answer can be held to.
        """
        matcher = self._compiler.compile(constraint)
        endless = ignore_eos or not self._eos_ids
        state = GrammarState(matcher, self._vocab_size, self._end_ids, constraint.param, endless=endless)
        if state.error or state.complete:
            why = state.error or "it allows no answer but an empty one."
            raise InvalidRequestError(f"{constraint.param}: {why}", param=constraint.param, code="invalid_grammar")
        return state


class GrammarState:
    """One answer in its grammar. `param`: the field of the request that the grammar came from.

    `complete`: nothing may follow but the end. `error`: why the answer cannot go on; then nothing here has a meaning
    any more. Limits on a grammar's cost and tokens that the grammar needs and the vocabulary lacks end up there.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, eos_ids: Sequence[int], param: str, *, endless: bool
    ) -> None:
        """`vocab_size` is the model's, at least the tokenizer's; `endless`: no end while more may follow."""
        self.param = param
        self.complete = False
        self.error: str | None = None
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._going_on = ~_bits(eos_ids, self._num_words)
        self._endless = endless
        self._ahead: list[int] = []  # tokens walked beyond the answer
        self._masks: list[Mask | None] = []  # behind so many of them
        self._settle()

    def fork(self) -> GrammarState:
        """Another answer that stands where this one does."""
        self._rewind(0)
        twin = object.__new__(GrammarState)
        for name, value in vars(self).items():
            setattr(twin, name, value)
        twin._matcher, twin._ahead, twin._masks = self._matcher.deep_copy(), [], list(self._masks)
        return twin

    def mask(self, drafts: Sequence[int]) -> Mask | None:
        """The tokens that may follow `drafts`; None where the grammar refuses one of them, or ends with them."""
        return self._mask_behind(len(drafts)) if self.num_allowed(drafts) == len(drafts) else None

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """The number of `drafts`, from the first, that the grammar allows."""
        shared = _shared(self._ahead, drafts)
        if shared < len(drafts):
            self._rewind(shared)
        for token in drafts[shared:]:
            if not _allows(self._mask_behind(len(self._ahead)), token):
                break
            self._matcher.consume_token(token)
            self._ahead.append(token)
        return min(len(self._ahead), len(drafts))

    def advance(self, tokens: Sequence[int]) -> int:
        """Take `tokens` over into the answer. Fewer than all were taken if the grammar was complete before the last."""
        taken = self.num_allowed(tokens)
        if taken < len(tokens) and (taken == 0 or self._mask_behind(taken) is not None):
            self.give_up()
        self._rewind(taken)
        self._ahead, self._masks = [], self._masks[taken:]
        self._settle()
        return taken

    def give_up(self) -> None:
        """The answer cannot go on, as whatever may follow is forbidden by something else."""
        self.error = self.error or "the grammar and the other options together leave no token to choose."

    def failure(self) -> InvalidRequestError:
        """`error` for the caller."""
        return InvalidRequestError(f"{self.param}: {self.error}", param=self.param, code="grammar_failed")

    def _settle(self) -> None:
        """See whether the answer can go on from where it stands."""
        if self._mask_behind(0) is None and self.error is None:
            self.complete = self._matcher.is_accepting() or self._matcher.is_stopped()
            if not self.complete:
                self.error = "no token of this model continues the answer as the grammar wants it."

    def _rewind(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of those walked ahead."""
        if num_tokens < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - num_tokens)
            del self._ahead[num_tokens:], self._masks[num_tokens + 1 :]

    def _mask_behind(self, num_ahead: int) -> Mask | None:
        """The mask behind the first `num_ahead` of the tokens walked ahead: known, or to be had where they end."""
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


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _allows(mask: Mask | None, token: int) -> bool:
    return mask is not None and bool(mask[token // 32] >> (token % 32) & 1)


def _bits(token_ids: Sequence[int], num_words: int) -> Mask:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[[token for token in token_ids if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
