"""Fork safety: closes all databases of the process before `os.fork()`, so that no SQLite lock state is copied.

POSIX locks stay with the parent, but SQLite's record of its locks would be copied, and the child would write without
any lock. A mutex inside SQLite that another thread holds during the fork would never be released in the child.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

FORK_WAIT_S = 5.0
"""Time that a fork waits for threads using a database, in seconds."""


class ForkAware(Protocol):
    """Resource that must be released before a fork."""

    def before_fork(self, timeout_s: float, /) -> bool:
        """Release the resource and lock out other threads. Returns False if it stays in use beyond `timeout_s`."""
        ...

    def after_fork(self, in_child: bool, /) -> None:
        """Allow other threads to use the resource again."""
        ...


class ForkGuard:
    """Registry of the fork-aware resources of a process."""

    def __init__(self) -> None:
        #: Reason why this process must not open a database; empty if opening is safe.
        self.problem = ""
        self._resources = weakref.WeakSet[ForkAware]()
        self._lock = threading.Lock()
        self._held: list[ForkAware] = []
        self._busy: list[ForkAware] = []  # kept alive in a child, because destroying a resource uses the database
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before,
                after_in_parent=lambda: self._after(in_child=False),
                after_in_child=lambda: self._after(in_child=True),
            )

    def add(self, resource: ForkAware) -> None:
        """Register `resource` until it is garbage-collected. Blocks during a fork."""
        with self._lock:
            self._resources.add(resource)

    def _before(self) -> None:
        self._lock.acquire()
        until = time.monotonic() + FORK_WAIT_S
        self._busy = []
        for resource in list(self._resources):
            paused = resource.before_fork(max(0.0, until - time.monotonic()))
            (self._held if paused else self._busy).append(resource)

    def _after(self, *, in_child: bool) -> None:
        held, self._held = self._held, []
        for resource in held:
            resource.after_fork(in_child)
        if not in_child:
            self._busy = []
        elif self._busy:
            self.problem = (
                f"a thread of the parent process used a database for more than {FORK_WAIT_S:.0f} s during os.fork();"
                " fork before the first request, or start child processes with multiprocessing's spawn"
            )
        self._lock.release()


FORKS = ForkGuard()  # one per process, because `os.fork()` affects all databases
