"""`/updraft/markdown`: an answer's Markdown as safe HTML."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import msgspec
from markdown_it import MarkdownIt

from ....protocol.decoding import decode, prepare_types
from ....protocol.http.wire import WireResponse, off_event_loop
from ..routes.route import RequestContext, Route


class MarkdownText(msgspec.Struct, forbid_unknown_fields=True):
    """Markdown text of a model."""

    text: Annotated[str, msgspec.Meta(max_length=200_000)]


class RenderedText(msgspec.Struct):
    """The text as HTML, without any raw HTML tags or images of the model."""

    html: str


prepare_types(MarkdownText)


@cache
def _renderer() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")


async def render(context: RequestContext) -> WireResponse:
    body = context.request.body
    given = decode(body, MarkdownText)
    return WireResponse.json(RenderedText(await off_event_loop(body, lambda: _renderer().render(given.text))))


ROUTES = (Route("POST", "/updraft/markdown", render, "an answer's Markdown as safe HTML", MarkdownText, RenderedText),)
