"""Tokens reported by a model server, with confidence signals computed from their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....protocol.errors import UpstreamError
from ...request.json_narrowing import object_of, rows, tables

TOP = 8
"""Alternatives requested per token, to estimate the entropy."""

_MOST = 2**20  # maximum number of distinct tokens; no vocabulary has more


@dataclass(frozen=True, slots=True)
class ServerSignals:
    """`Signals` of a token from the server's alternatives. The entropy is a lower bound: other tokens count as one."""

    logprob: float
    entropy: float
    margin: float

    @staticmethod
    def of(logprob: float, alternatives: Sequence[float]) -> ServerSignals:
        """Build the signals. `alternatives`: log-probabilities of the most likely tokens."""
        known = sorted(alternatives or (logprob,), reverse=True)
        shares = [math.exp(each) for each in known]
        rest = 1 - sum(shares)
        entropy = -sum(share * each for share, each in zip(shares, known, strict=True) if share > 0)
        entropy -= rest * math.log(rest) if rest > 1e-9 else 0.0
        runner_up = known[1] if len(known) > 1 else math.log(max(rest, 1e-9))
        return ServerSignals(logprob, max(0.0, entropy), max(0.0, known[0] - runner_up))


NO_SIGNALS = ServerSignals(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class ServerToken:
    """Token of a server's answer, in the form that gates and streams read."""

    id: int
    text: str
    signals: ServerSignals
    top: tuple[tuple[int, float], ...] = ()


class SeenVocabulary:
    """Vocabulary of the tokens seen so far. It assigns IDs, since the server sends token bytes without IDs."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._bytes: list[bytes] = []

    def id_of(self, token: bytes) -> int:
        """Return the token's ID. Raises UpstreamError if there are too many tokens for a vocabulary."""
        token_id = self._ids.get(token)
        if token_id is None:
            if len(self._bytes) >= _MOST:
                raise UpstreamError("The local server sent too many distinct tokens for a vocabulary.")
            token_id = self._ids[token] = len(self._bytes)
            self._bytes.append(token)
        return token_id

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def tokens(self, text: str, reported: list[dict[str, Any]], shown: int | None) -> list[ServerToken]:
        """Return the tokens of one event; the last one has all `text`. `shown`: number of alternatives to report."""
        if not reported:  # the server reported only text
            return [ServerToken(self.id_of(b""), text, NO_SIGNALS)] if text else []
        tokens: list[ServerToken] = []
        for at, entry in enumerate(reported):
            named = [(other, _logprob(other)) for other in tables(entry.get("top_logprobs")) or []]
            top = [(other, value) for other, value in named if value is not None]
            logprob = _logprob(entry)
            signals = NO_SIGNALS if logprob is None else ServerSignals.of(logprob, [value for _, value in top])
            alternatives = tuple((self.id_of(_raw(other)), value) for other, value in top[: shown or 0])
            own = text if at == len(reported) - 1 else ""
            tokens.append(ServerToken(self.id_of(_raw(entry)), own, signals, alternatives))
        return tokens


def reported_in(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probability entries of an event, one per token."""
    logprobs = object_of(choice.get("logprobs"))
    return [entry for entry in tables(logprobs.get("content")) or [] if _logprob(entry) is not None]


def _logprob(entry: dict[str, Any]) -> float | None:
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return max(-1e4, min(0.0, float(value)))


def _raw(entry: dict[str, Any]) -> bytes:
    raw = rows(entry.get("bytes"))
    if raw is not None and all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw):
        return bytes(raw)
    return str(entry.get("token") or "").encode(errors="replace")
