"""Explanations of requests from their ledger rows, for `updraft why`, the API and the SDK."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Any, Literal

import msgspec

from ...protocol.decoding import prepare_types
from .ledger import LedgerRow

GATES = ("rules", "before", "during", "after")
ROUTES = {
    "local": "by the device",
    "cloud": "by the cloud",
    "escalated": "by the cloud, which continued or verified the device's text",
    "fallback": "by the device, because the cloud call failed",
    "cache": "from the cache, with the answer to an identical request",
    "none": "not at all",
}
THUMBS = {1: "up", -1: "down"}


class Explanation(msgspec.Struct, kw_only=True):
    """The response of `GET /updraft/requests/{id}`."""

    # The request's ledger row. `decisions` is decoded from JSON.
    request: dict[str, Any]
    # Text by label, in reading order: `request`, `answered`, `because`, `decisions` and more.
    explanation: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"{label}: {text}" for label, text in self.explanation.items())


class FeedbackNote(msgspec.Struct, kw_only=True):
    """The response of `POST /updraft/requests/{id}/feedback`."""

    request_id: str
    # Feedback that is now recorded.
    feedback: Literal["up", "down"]
    # Whether `updraft learn` will use the feedback: only if the request's local answer was stored for learning.
    learned: bool


def explanation_of(row: LedgerRow) -> Explanation:
    return Explanation(request=facts_of(row), explanation=explained(row))


def facts_of(row: LedgerRow) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "ts": row.started_at, "decisions": decisions_of(row)}


def decisions_of(row: LedgerRow) -> list[dict[str, Any]]:
    return json.loads(row.decisions)


def explained(row: LedgerRow) -> dict[str, str]:
    """Return texts that explain the row, by label, safe to print on a terminal."""
    facts = {
        "request": [f"{row.id}, {time_of(row)}, model {row.model or '-'}, status {row.status}"],
        "answered": [ROUTES.get(row.route, row.route)],
        "because": [row.reason],
        "decisions": [_decision(each) for each in decisions_of(row)] or ["none recorded"],
    }
    if row.failure:
        facts["cloud failed"] = [row.failure]
    facts["time"] = [f"{row.latency_ms:,.0f} ms: device {row.local_ms:,.0f} ms, cloud {row.cloud_ms:,.0f} ms"]
    facts["tokens"] = [
        f"device {row.local_prompt_tokens:,} read, {row.local_tokens:,} written; "
        f"cloud {row.cloud_prompt_tokens:,} read, {row.cloud_tokens:,} written"
    ]
    if row.draft_proposed:
        facts["draft"] = [f"{row.draft_accepted:,} of {row.draft_proposed:,} draft tokens accepted by the cloud"]
    if row.cloud_model:
        facts["cloud"] = [row.cloud_model]
    saved = "saving unknown" if row.saved_usd is None else f"saved {_dollars(row.saved_usd)}"
    facts["cost"] = [f"{_dollars(row.cost_usd)}, {saved} against the cloud alone"]
    if row.feedback:
        facts["feedback"] = [THUMBS[row.feedback]]
    if row.task:
        facts["task"] = [row.task]
    if row.key:
        facts["key"] = [f"{row.key[:12]} (digest)"]
    return {label: "\n".join(map(printable, lines)) for label, lines in facts.items()}


def time_of(row: LedgerRow) -> str:
    """Return the request's start time in ISO format, in the time zone of this machine."""
    return datetime.fromtimestamp(row.started_at).astimezone().isoformat(sep=" ", timespec="seconds")


def printable(text: str) -> str:
    """Replace unprintable characters, since callers' text must not control the terminal or fake another line."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _dollars(value: float | None) -> str:
    return "unknown: no price configured" if value is None else f"${value:.6f}"


def _decision(verdict: dict[str, Any]) -> str:
    gate = verdict["gate"]
    p_gain, threshold, reason = verdict["p_gain"], verdict["threshold"], verdict["reason"]
    if p_gain is not None and threshold is not None and "P(gain)" not in reason:
        reason += f" [P(gain) {p_gain:.3f}, threshold {threshold:.3f}]"
    return f"gate {gate} {GATES[gate]}: {'cloud' if verdict['escalate'] else 'device'}: {reason}"


prepare_types(Explanation, FeedbackNote)
