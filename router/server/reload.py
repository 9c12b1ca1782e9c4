"""Settings that change while the daemon runs: read again on SIGHUP and when their file changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import UpdraftError
from ...protocol.safety.system import on_hangup
from ..config import RouterConfig
from ..router import Router

log = logging.getLogger("updraft.router")

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Reload:
    """Settings that are read again."""

    # The settings file, there or not.
    file: Path
    # Raises ConfigurationError.
    load: Callable[[], RouterConfig]


async def follow_settings(router: Router, reload: Reload) -> None:
    """Give `router` the settings as they are after each change of their file, until cancelled.

    Settings that cannot be used, or that want a restart, change nothing: the log says why.
    """
    asked = asyncio.Event()
    last = _version(reload.file)
    with on_hangup(asked.set):
        while True:
            try:
                async with asyncio.timeout(POLL_S):
                    await asked.wait()
            except TimeoutError:
                if _version(reload.file) == last:
                    continue
            asked.clear()
            last = _version(reload.file)
            await _apply(router, reload.load)


async def _apply(router: Router, load: Callable[[], RouterConfig]) -> None:
    try:
        changed = await router.reconfigure(await asyncio.to_thread(load))
    except UpdraftError as error:
        log.warning("the settings stay as they were: %s", error.message)
        return
    if changed:
        log.warning("new settings: %s", ", ".join(changed))


def _version(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
