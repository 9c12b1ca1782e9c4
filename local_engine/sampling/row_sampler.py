"""Sampling of a token from one row of logits; the same seed and logits give the same token as in the cloud engine.

A sampler belongs to one answer, and keeps its penalty counts and its position in the grammar.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.sampling import MIN_TEMPERATURE, ResolvedParams, noise_key
from ...text.logit_edits import LogitEditor
from .gumbel_noise import Floats, Indices, draw
from .truncation import survivors

if TYPE_CHECKING:
    from ...text.grammars.state import GrammarState, Mask


class RowSampler:
    """Chooses the tokens of one answer, one after the other. Not thread-safe.

    `end_ids`: tokens that end the answer (`SamplingParams.end_ids`). Without a seed, each answer gets a random one.
    `constraint`: a grammar at its start; the sampler advances it.
    """

    def __init__(
        self,
        params: ResolvedParams,
        prompt_ids: Sequence[int],
        end_ids: Iterable[int],
        constraint: GrammarState | None = None,
    ) -> None:
        self._params = params
        self._prompt_length = len(prompt_ids)
        self._end_ids = frozenset(end_ids)
        self._temperature = params.temperature
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._editor = LogitEditor(params, prompt_ids, self._end_ids) if params.edits else None
        self._grammar = constraint
        self._is_greedy = self._temperature < MIN_TEMPERATURE and self._editor is None and constraint is None

    @property
    def complete(self) -> bool:
        """Return whether the grammar is complete, so that no token may follow."""
        return self._grammar is not None and self._grammar.complete

    def choose(self, logits: Floats, generated: Sequence[int], best: int | None = None) -> int:
        """Choose the token after `generated`. `logits` (vocab,) stay unchanged; `best`: index of the largest, if known.

        Raises InvalidRequestError if the grammar, alone or with the other options, allows no token.
        """
        if self._is_greedy and best is not None:
            return best
        row = logits if self._editor is None else _edited(self._editor, logits, generated)
        if self._grammar is None:
            return self._pick(row, None, len(generated))
        ids = _allowed(self._grammar.mask(()), len(row))
        token = self._pick(row, ids, len(generated))
        if row[token] == -np.inf:
            self._grammar.give_up()
        elif token not in self._end_ids:
            self._grammar.advance([token])
        if self._grammar.error is not None:
            raise self._grammar.failure()
        return token

    def _pick(self, row: Floats, ids: Indices | None, num_generated: int) -> int:
        """Return one of `ids` (None: of all tokens), chosen by the logits in `row` (vocab,)."""
        candidates = row if ids is None else row[ids]
        best = int(candidates.argmax())
        if self._temperature >= MIN_TEMPERATURE and candidates[best] > -np.inf:
            if self._params.truncates:
                survivor_ids = survivors(candidates, self._params, self._temperature)
                ids = survivor_ids if ids is None else ids[survivor_ids]
                candidates = candidates[survivor_ids]
            key = noise_key(self._seed, self._prompt_length + num_generated)
            best = draw(key, ids, candidates, self._temperature)
        return best if ids is None else int(ids[best])


def _allowed(mask: Mask | None, vocab_size: int) -> Indices:
    """Return the ids whose bits are set, in ascending order."""
    if mask is None:
        raise ValueError("The grammar is complete or has failed, so no token can follow.")
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits.view(np.bool_))


def _edited(editor: LogitEditor, logits: Floats, generated: Sequence[int]) -> Floats:
    editor.extend(generated[editor.num_tokens :])
    edits = editor.edits()
    return logits if edits is None else edits.applied(logits)
