"""The authenticated caller of a request: scopes, priority, models and limits of its key."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import PermissionDeniedError
from ....protocol.safety.names import MAX_NAME

Scope = Literal["inference", "usage", "admin", "node"]
Priority = Literal["interactive", "escalation", "batch"]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
Models = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)], ...], msgspec.Meta(max_length=256)
]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Dollars = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

SCOPES: tuple[Scope, ...] = get_args(Scope)
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a key. None means unlimited."""

    # Requests that may start per minute.
    requests_per_minute: _Count | None = None
    # Prompt and completion tokens per minute.
    tokens_per_minute: _Count | None = None
    # Maximum number of requests in flight.
    max_concurrency: _Count | None = None
    # US dollars per UTC day.
    usd_per_day: _Dollars | None = None
    # US dollars per UTC month.
    usd_per_month: _Dollars | None = None

    @property
    def has_budget(self) -> bool:
        return self.usd_per_day is not None or self.usd_per_month is not None


class Principal(msgspec.Struct, frozen=True):
    """The authenticated caller of a request."""

    # Permanent id of the key; rotation keeps the id.
    key_id: str
    # Name of the key in usage rows.
    name: str
    # Owner of the key. Keys of one tenant share cached prefixes and the tenant's limits.
    tenant: str
    # Kinds of requests that the key is valid for.
    scopes: tuple[Scope, ...]
    priority: Priority = "interactive"
    # Models that the key may use. Empty: all.
    models: tuple[str, ...] = ()
    # Limits of the key itself, besides those of its tenant and the model.
    limits: Limits = Limits()

    def require(self, scope: Scope) -> None:
        """Check that the key has the scope. Raises PermissionDeniedError."""
        if scope not in self.scopes:
            raise PermissionDeniedError(
                f"This needs a key with the scope {scope!r}; this key has {', '.join(self.scopes) or 'none'}. "
                f"An operator can create one with `updraft keys create NAME --scope {scope}`."
            )

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Check that the key may use the model. Raises PermissionDeniedError."""
        if not self.may_use(model):
            raise PermissionDeniedError(
                f"This key may not use the model {model!r}; it may use {', '.join(self.models)}.", param="model"
            )


prepare_types(Principal)


#: The principal of every request on a gateway without authentication.
ANONYMOUS = Principal("", "anonymous", "anonymous", SCOPES)
