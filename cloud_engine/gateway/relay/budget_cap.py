"""The cap that a budget writes into a request, and its replacement if a node refuses the cap."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from ....accounting.token_estimate import LENGTH_FIELDS, LIMITS, cap_fault, capped
from ....protocol.http.lenient_json import error_in

REFUSALS = (400, 422)  # statuses with which servers refuse a field


@dataclass(frozen=True, slots=True)
class BudgetCap:
    """A cap on each answer's tokens, written into the fields of a request that limit its answer."""

    tokens: int
    # Request without the cap.
    uncapped: bytes
    # Length limits in which a node may accept the cap; the first is used. Empty: the request is sent without the cap.
    limits: tuple[str, ...]

    @classmethod
    def of(cls, path: bytes, body: bytes, tokens: int) -> BudgetCap | None:
        """Return the cap on a request to `path`. None if the API has no length limit."""
        limits = LIMITS.get(path.partition(b"?")[0].removeprefix(b"/v1/").decode())
        if limits is None:
            return None
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        is_given = any(bytes(fields.get(name, b"null")) != b"null" for name in limits)
        return cls(tokens, body, limits[:1] if is_given else limits)

    @property
    def body(self) -> bytes:
        if not self.limits:
            return self.uncapped
        fields = msgspec.json.decode(self.uncapped, type=dict[str, msgspec.Raw])  # other fields stay unchanged
        lengths = {name: msgspec.json.decode(fields[name]) for name in LENGTH_FIELDS if name in fields}
        return msgspec.json.encode(capped({**fields, **lengths}, self.tokens, self.limits))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """A header that tells the client about the cap; none if the request is sent without the cap."""
        note = f"{self.limits[0]}: the budget leaves {self.tokens} tokens for this answer" if self.limits else ""
        return [(b"x-updraft-notes", note.encode())] if note else []

    def replaced(self, refusal: bytes) -> BudgetCap | None:
        """Return the cap with which to repeat a request that a node refused. None if the cap was not the reason.

        A node refuses a cap above its own maximum. The budget then covers that maximum, so the answer needs no cap.
        """
        if not self.limits:
            return None
        error = error_in(refusal, REFUSALS[0], "")
        fault = cap_fault(self.limits[0], error["message"], error["param"], error["code"])
        if fault is None or (fault == "unsupported" and not self.limits[1:]):
            return None
        return replace(self, limits=() if fault == "too_large" else self.limits[1:])
