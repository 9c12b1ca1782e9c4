"""Log-probabilities of an echoed prompt (`echo` and `logprobs` of `/v1/completions`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..protocol.responses import TextLogprobs
from .detokenize import IncrementalDetokenizer

#: Log-probability of a token, and the likeliest tokens in its place, as (ID, log-probability).
Score = tuple[float, Iterable[tuple[int, float]]]


def echoed_logprobs(
    token_ids: Sequence[int], scores: Iterable[Score], token_bytes: Callable[..., bytes]
) -> TextLogprobs:
    """Return the log-probabilities of all tokens of a prompt but the first, which has none."""

    def text_of(token_id: int) -> str:
        return token_bytes(token_id, skip_special=False).decode("utf-8", "replace")

    echoed = TextLogprobs(tokens=[*map(text_of, token_ids)], token_logprobs=[None], top_logprobs=[None], text_offset=[])
    for token, (logprob, top) in zip(echoed.tokens[1:], scores, strict=True):
        echoed.token_logprobs.append(logprob)
        echoed.top_logprobs.append({**{text_of(other): each for other, each in top}, token: logprob})
    detokenizer, offset = IncrementalDetokenizer(lambda token_id: token_bytes(token_id, skip_special=True)), 0
    for token_id in token_ids:  # a token may have no text, or only a part of a character
        echoed.text_offset.append(offset)
        offset += len(detokenizer.push(token_id))
    return echoed
