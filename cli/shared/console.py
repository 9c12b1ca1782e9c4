"""rich's console, whose texts cannot command the terminal. Imported when a command runs: rich takes a moment."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from ...protocol.safety.terminal_text import printable


class Console(RichConsole):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich's own commands to the terminal are control segments, and its colours are styles.
            yield segment if segment.control else segment._replace(text=printable(segment.text))
