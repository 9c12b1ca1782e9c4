"""Settings reload: on SIGHUP, and when the settings file changes."""

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
    """Source of reloaded settings."""

    # Settings file, which may be missing.
    file: Path
    # Function that reads the settings. Raises ConfigurationError if they are invalid.
    load: Callable[[], RouterConfig]


async def follow_settings(router: Router, reload: Reload) -> None:
    """Reconfigure `router` on SIGHUP and after each change of the settings file, until cancelled.

    Invalid settings, or settings that need a restart, change nothing and are logged.
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
        log.warning("settings not changed: %s", error.message)
        return
    if changed:
        log.warning("settings changed: %s", ", ".join(changed))


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
