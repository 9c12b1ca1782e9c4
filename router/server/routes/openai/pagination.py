"""Pagination as in OpenAI's API: `limit`, `after` and `order`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import parse_qsl

from .....protocol.errors import InvalidRequestError, NotFoundError
from .....protocol.http.wire import WireResponse
from ....storage.answer_store import Page

_MAX_LIMIT = 100
_SWITCHES = {"": True, "true": True, "1": True, "false": False, "0": False}
PAGE_PARAMETERS = ("limit", "after", "order")


def query_of(raw: str, known: Collection[str]) -> dict[str, str]:
    """Return the query parameters, with the last value of each name. Raises InvalidRequestError for an unknown name."""
    given = dict(parse_qsl(raw, keep_blank_values=True))
    for name in given:
        if name.partition("[")[0] not in known:
            raise InvalidRequestError(f"Unknown query parameter {name[:100]!r}. Known: {', '.join(known)}.", param=name)
    return given


def switch_of(query: dict[str, str], name: str) -> bool:
    """Return whether a switch is on; a name without a value switches it on. Raises InvalidRequestError."""
    if (on := _SWITCHES.get(query.get(name, "false").lower())) is None:
        raise InvalidRequestError(f"{name} must be true or false, got {query[name][:40]!r}.", param=name)
    return on


def page_of(query: dict[str, str], *, newest_first: bool, most: int = _MAX_LIMIT, usual: int = 20) -> Page:
    """Return the requested page. `newest_first` and `usual`: default order and limit. Raises InvalidRequestError."""
    limit, order = query.get("limit", str(usual)), query.get("order", "desc" if newest_first else "asc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise InvalidRequestError(f"limit must be 1 to {most}, got {limit[:40]!r}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:40]!r}.", param="order")
    return Page(int(limit), query.get("after"), order == "desc")


def page_in(entries: Sequence[dict[str, Any]], page: Page) -> WireResponse:
    """Return a page of `entries` (oldest first). Raises NotFoundError if `after` is unknown."""
    ordered = list(reversed(entries)) if page.newest_first else list(entries)
    begin = 0
    if page.after is not None:
        ids = [entry["id"] for entry in ordered]
        if page.after not in ids:
            raise NotFoundError(f"after: {page.after[:100]!r} is not in this list.", param="after")
        begin = ids.index(page.after) + 1
    return list_of(ordered[begin : begin + page.limit], has_more=len(ordered) > begin + page.limit)


def list_of(entries: Sequence[dict[str, Any]], *, has_more: bool) -> WireResponse:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return WireResponse.json(
        {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}
    )
