"""The usage row of a request, and the schema of its table."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import getrandbits  # each forked process has its own seed
from typing import Literal

from ....accounting.ledger.table import NOT_STORED, LedgerTable, RequestRow

RESPONSE_CACHE = "response-cache"
"""Value of `node` in rows whose answer came from the response cache."""

State = Literal["intent", "settled", "abandoned"]


def row_id() -> str:
    """Return a unique id that sorts by time, so that new rows go to the end of the index."""
    return f"{time.time_ns():016x}{getrandbits(64):016x}"


@dataclass(slots=True)
class UsageRow(RequestRow):
    """The usage and outcome of one request."""

    # Request id from `x-request-id`; clients may choose it, so it need not be unique.
    request_id: str = field(kw_only=True)
    # Name of the caller's key.
    key_name: str = ""
    # URL of the node that answered or was tried last, or `response-cache`.
    node: str = ""
    # Prompt tokens; estimated if the answer broke off before the node reported them.
    prompt_tokens: int = 0
    # Prompt tokens that the node wrote to its cache.
    stored_tokens: int = field(default=0, metadata=NOT_STORED)
    # Those of them that the cache keeps for an hour.
    stored_1h_tokens: int = field(default=0, metadata=NOT_STORED)
    # Completion tokens.
    completion_tokens: int = 0
    # Tokens of the request's prediction that the model accepted.
    accepted_prediction_tokens: int = 0
    # Tokens of the request's prediction that the model rejected.
    rejected_prediction_tokens: int = 0
    # Time to the first byte, in milliseconds.
    ttft_ms: float | None = None
    # Number of nodes that were tried before this one.
    retries: int = 0
    # Bytes sent to the client.
    bytes: int = 0
    # Priority in the queue: `interactive`, `escalation` or `batch`.
    tier: str = ""
    # Permanent id of the caller's key.
    key_id: str = ""
    # Tenant that owns the key.
    tenant: str = ""
    # Id of the worker process that served the request.
    worker: str = ""
    # `settled`, or `abandoned` if the worker died first. PostgreSQL also stores `intent` while a request is in flight.
    state: State = "intent"
    # Unique id of the row.
    id: str = field(default_factory=row_id)


# Column order in files of unfinished rows that are too old to have a format number.
_RECORD = (
    *("request_id", "key_name", "model", "node", "status", "prompt_tokens", "completion_tokens"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens", "latency_ms", "ttft_ms", "retries", "bytes"),
    *("started_at", "cached_tokens", "cost_usd", "tier", "key_id", "tenant", "worker", "state", "id"),
)
_SUMMED = (
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens", "bytes"),
)
# SQL expression for the id of an old row, because early gateways used integers.
_ID = "CASE typeof(id) WHEN 'integer' THEN printf('before-%016d', id) ELSE id END"

USAGE = LedgerTable(
    name="usage",
    row=UsageRow,
    indexes=(
        "usage_key ON usage (key_id, started_at)",
        "usage_time ON usage (started_at)",
        "usage_intents ON usage (worker) WHERE state = 'intent'",
    ),
    format=1,
    purpose="usage database",
    param="ledger",
    upgrades={
        1: {"id": _ID, "tier": "'interactive'", "key_id": "key_name", "tenant": "key_name", "state": "'settled'"}
    },
    records={0: _RECORD},
    groups={"key": "key_name", "tenant": "tenant", "model": "model", "node": "node", "tier": "tier"},
    sums={
        "abandoned": "SUM(CASE WHEN state = 'abandoned' THEN 1 ELSE 0 END)",
        "unpriced": "SUM(CASE WHEN cost_usd IS NULL AND status < 400 AND state = 'settled' THEN 1 ELSE 0 END)",
        **{name: f"SUM({name})" for name in _SUMMED},
        "cost_usd": "COALESCE(SUM(cost_usd), 0.0)",
    },
    state="state",
    fixed=frozenset(("id", "request_id", "key_name", "model", "started_at", "tier", "key_id", "tenant", "worker")),
)
values_of = USAGE.values_of
