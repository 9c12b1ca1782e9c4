"""The llama.cpp context with a memory of what its KV cache holds, so that any run can continue on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .llama import Floats, LlamaContext
from .sampler import token_logprobs


@dataclass(frozen=True, slots=True)
class Prefill:
    """State after a prompt: logits (vocab,) and hidden state (hidden,) at its last token, and the log-probability of
    each token but the first (n-1,); float32."""

    logits: Floats
    hidden: Floats
    logprobs: Floats


class CachedContext:
    """One sequence in one context. One thread at a time.

    A prompt is decoded in chunks of `n_batch`; of the sequence before, the common *whole* chunks are kept. Chunks cut
    elsewhere would save a little more but change the last bits of the results, and thereby, rarely, a greedy answer.
    """

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._tokens: list[int] = []  # what the KV cache holds
        self._logprobs: list[float] = []  # of self._tokens[1:], as far as the prompt went
        self._prompt_length = 0

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the cache holds exactly these tokens."""
        return self._tokens == tokens

    def prefill(self, tokens: Sequence[int], stop: Callable[[], bool]) -> Prefill | None:
        """Make the cache hold `tokens` (at least one); None if `stop()` turned true between two chunks."""
        size = self._context.n_batch
        start = self._common_chunks(tokens) * size
        if not self._context.keep(start):
            start = 0
        self._tokens, self._logprobs = self._tokens[:start], self._logprobs[:start]
        self._prompt_length = start
        logits = hidden = np.empty((0, 0), dtype=np.float32)
        for begin in range(start, len(tokens), size):
            if stop():
                return None
            chunk = tokens[begin : begin + size]
            logits, hidden = self._decode(chunk)
            self._prompt_length = len(self._tokens)
            known = np.asarray(tokens[begin + 1 : begin + len(chunk) + 1], dtype=np.intp)
            self._logprobs += token_logprobs(logits[: len(known)], known).tolist()
        return Prefill(logits[-1].copy(), hidden[-1].copy(), np.asarray(self._logprobs, dtype=np.float32))

    def append(self, token: int) -> tuple[Floats, Floats]:
        """Decode one more token: logits (vocab,) and hidden state (hidden,)."""
        logits, hidden = self._decode([token])
        return logits[0].copy(), hidden[0].copy()

    def score(self, tokens: Sequence[int]) -> Floats:
        """Log-probabilities (n, vocab) of what follows each token."""
        self.forget()
        rows: list[Floats] = []
        for begin in range(0, len(tokens), self._context.n_batch):
            logits, _ = self._decode(tokens[begin : begin + self._context.n_batch])
            shifted = logits - logits.max(axis=1, keepdims=True)
            rows.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
        return np.concatenate(rows)

    def forget(self) -> None:
        self._context.keep(0)
        self._tokens, self._logprobs, self._prompt_length = [], [], 0

    def close(self) -> None:
        self._context.close()

    def _decode(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        try:
            result = self._context.decode(tokens, len(self._tokens))
        except BaseException:
            self.forget()
            raise
        self._tokens += tokens
        return result

    def _common_chunks(self, tokens: Sequence[int]) -> int:
        """How many whole chunks, and the token after each, this prompt shares with the last one.

        The token after a chunk counts because the logits that gave its log-probability are gone.
        """
        size = self._context.n_batch
        limit = max(0, min(self._prompt_length, len(tokens)) - 1) // size
        for chunk in range(limit):
            span = slice(chunk * size, (chunk + 1) * size + 1)
            if self._tokens[span] != list(tokens[span]):
                return chunk
        return limit
