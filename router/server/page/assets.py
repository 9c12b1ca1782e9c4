"""Static files of the web page, served without a key and with a policy that limits the browser to this server.

`/updraft/markdown` renders the Markdown of an answer as safe HTML.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from markdown_it import MarkdownIt

from ....protocol.decoding import decode
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from ..routes.route import RequestContext, Route

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def _files() -> dict[str, Path]:
    return {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}


def public_paths() -> tuple[str, ...]:
    """Paths of the page's static files, which need no key because they contain no data."""
    return ("/", *(f"/page/{name}" for name in _files()))


async def asset(context: RequestContext) -> WireResponse:
    name = context.parameters.get("file", "index.html")
    path = _files().get(name)
    if path is None:
        raise NotFoundError(f"The page has no file {name[:100]!r}.")
    return WireResponse(200, {"content-type": f"{_TYPES[path.suffix]}; charset=utf-8", **_HEADERS}, path.read_bytes())


class MarkdownText(msgspec.Struct, forbid_unknown_fields=True):
    """Markdown text of a model."""

    text: Annotated[str, msgspec.Meta(max_length=200_000)]


class RenderedText(msgspec.Struct):
    """The text as HTML, without any raw HTML tags or images of the model."""

    html: str


@cache
def _renderer() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")


async def render(context: RequestContext) -> WireResponse:
    given = decode(context.request.body, MarkdownText)
    html = await asyncio.to_thread(_renderer().render, given.text)  # short texts, too: a table can take seconds
    return WireResponse.json(RenderedText(html))


ROUTES = (
    Route("GET /", asset, "the web page; needs no key"),
    Route("GET /page/{file}", asset, "scripts and styles of the web page; need no key"),
    Route("POST /updraft/markdown", render, "an answer's Markdown as safe HTML", MarkdownText, RenderedText),
)
