"""The caller of a request, and its rights: what a key stands for."""

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
    """The limits of a key. None: no limit."""

    # Requests that may begin within a minute.
    requests_per_minute: _Count | None = None
    # Tokens of prompts and answers within a minute.
    tokens_per_minute: _Count | None = None
    # Requests in flight.
    concurrent: _Count | None = None
    # Dollars a day of UTC.
    usd_per_day: _Dollars | None = None
    # Dollars a month of UTC.
    usd_per_month: _Dollars | None = None


class Principal(msgspec.Struct, frozen=True):
    """The caller behind a request."""

    # Never changes, also not by rotation.
    key_id: str
    # What usage rows call the key.
    name: str
    # Keys of one tenant share cached prefixes and the tenant's limits.
    tenant: str
    # What the key may be used for.
    scopes: tuple[Scope, ...]
    # The class in which its requests queue.
    priority: Priority = "interactive"
    # The models that it may ask. Empty: all.
    models: tuple[str, ...] = ()
    # What it may use up.
    limits: Limits = Limits()

    def require(self, scope: Scope) -> None:
        """Raises PermissionDeniedError."""
        if scope not in self.scopes:
            raise PermissionDeniedError(
                f"This needs a key with the scope {scope!r}; this key has {', '.join(self.scopes) or 'none'}. "
                f"An operator makes one with `updraft keys create NAME --scope {scope}`."
            )

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raises PermissionDeniedError."""
        if not self.may_use(model):
            raise PermissionDeniedError(
                f"This key may not use the model {model!r}; it may use {', '.join(self.models)}.", param="model"
            )


prepare_types(Principal)


#: Everybody, where no key is asked for.
ANONYMOUS = Principal("", "anonymous", "anonymous", SCOPES)
