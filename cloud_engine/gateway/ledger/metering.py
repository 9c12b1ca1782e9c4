"""The row that a request leaves in the gateway's ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from operator import attrgetter
from random import getrandbits  # seeded anew in each forked process
from typing import Literal

from ....accounting.ledger.table import Values

RESPONSE_CACHE = "response-cache"
"""The node of rows whose answer was kept from an earlier request."""

State = Literal["intent", "settled", "abandoned"]


def row_id() -> str:
    """Unique among workers and gateways, and in the order of time, so that an index grows at its end."""
    return f"{time.time_ns():016x}{getrandbits(64):016x}"


@dataclass(slots=True)
class UsageRow:
    """The usage and outcome of one request."""

    # The id in `x-request-id`, which a client may choose.
    request_id: str
    # Whose key it was, by name.
    key_name: str = ""
    # The model that was asked for.
    model: str = ""
    # The node that answered, or that was tried last. `response-cache`: none, the answer was kept.
    node: str = ""
    # HTTP status. 499: the client left. 502 also for a stream that its node cut, though the wire said 200.
    status: int = 0
    # Tokens of the prompt; of an answer that broke off before they were told, an estimate.
    prompt_tokens: int = 0
    # Tokens of the answer.
    completion_tokens: int = 0
    # Tokens of the prediction that the model confirmed.
    accepted_prediction_tokens: int = 0
    # Tokens of the prediction that it did not.
    rejected_prediction_tokens: int = 0
    # Milliseconds of the whole request.
    latency_ms: float = 0.0
    # Milliseconds until the first byte.
    ttft_ms: float | None = None
    # Nodes that were tried before.
    retries: int = 0
    # Bytes that were sent to the client.
    bytes: int = 0
    # When it came, in seconds since the epoch.
    started_at: float = field(default_factory=time.time)
    # Tokens of the prompt that the node had in its cache.
    cached_tokens: int = 0
    # US dollars, by the prices of that moment. NULL: the model had no price.
    cost_usd: float | None = None
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


COLUMNS = tuple(column.name for column in fields(UsageRow))
_VALUES = attrgetter(*COLUMNS)


def values_of(row: UsageRow) -> Values:
    """In the order of `COLUMNS`."""
    return _VALUES(row)
