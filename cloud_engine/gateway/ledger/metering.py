"""The row of a request in the gateway's ledger, and the table of these rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import getrandbits  # seeded anew in each forked process
from typing import Literal

from ....accounting.ledger.table import LedgerTable, RequestRow

RESPONSE_CACHE = "response-cache"
"""The node of rows whose answer was kept from an earlier request."""

State = Literal["intent", "settled", "abandoned"]


def row_id() -> str:
    """Unique among workers and gateways, and in the order of time, so that an index grows at its end."""
    return f"{time.time_ns():016x}{getrandbits(64):016x}"


@dataclass(slots=True)
class UsageRow(RequestRow):
    """The usage and outcome of one request."""

    # The id in `x-request-id`, which a client may choose.
    request_id: str = field(kw_only=True)
    # Whose key it was, by name.
    key_name: str = ""
    # The node that answered, or that was tried last. `response-cache`: none, the answer was kept.
    node: str = ""
    # Tokens of the prompt; of an answer that broke off before they were told, an estimate.
    prompt_tokens: int = 0
    # Tokens of the answer.
    completion_tokens: int = 0
    # Tokens of the prediction that the model confirmed.
    accepted_prediction_tokens: int = 0
    # Tokens of the prediction that it did not.
    rejected_prediction_tokens: int = 0
    # Milliseconds until the first byte.
    ttft_ms: float | None = None
    # Nodes that were tried before.
    retries: int = 0
    # Bytes that were sent to the client.
    bytes: int = 0
    # The class in which it queued: `interactive`, `escalation` or `batch`.
    tier: str = ""
    # Whose key it was, by the id that never changes.
    key_id: str = ""
    # The tenant of the key.
    tenant: str = ""
    # Which process served it.
    worker: str = ""
    # `settled`, or `abandoned` if its worker died before that. PostgreSQL has a row before: `intent`.
    state: State = "intent"
    # The row's own id.
    id: str = field(default_factory=row_id)


# The order of columns in intent files from before records had a format number.
_RECORD = (
    *("request_id", "key_name", "model", "node", "status", "prompt_tokens", "completion_tokens"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens", "latency_ms", "ttft_ms", "retries", "bytes"),
    *("started_at", "cached_tokens", "cost_usd", "tier", "key_id", "tenant", "worker", "state", "id"),
)
_SUMMED = (
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens", "bytes"),
)
# The first gateways numbered their rows.
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
    param="db",
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
