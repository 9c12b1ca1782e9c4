"""A rich console that removes control characters from texts. Import this module late, because rich loads slowly."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from ...protocol.safety.redaction import printable


class Console(RichConsole):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Rich keeps its own escape sequences in control segments and styles, not in the text.
            yield segment if segment.control else segment._replace(text=printable(segment.text))
