"""Fork safety: each database of the process is closed before `os.fork()`, so that no lock of SQLite is copied.

POSIX locks stay with the parent process. SQLite's own notes about its locks would be copied to the child, and the child
would write without any lock. A lock inside SQLite that another thread holds at the fork would never be released.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

FORK_WAIT_S = 5.0
"""How long a fork waits for threads that use a database."""


class ForkAware(Protocol):
    """A resource of the process that must not cross a fork."""

    def before_fork(self, timeout_s: float, /) -> bool:
        """Let go of the resource and lock out other threads. False if these use it for longer than `timeout_s`."""
        ...

    def after_fork(self, in_child: bool, /) -> None:
        """Let other threads in again."""
        ...


class ForkGuard:
    """The fork-aware resources of one process."""

    def __init__(self) -> None:
        #: The reason why this process must not open a database; empty without one.
        self.problem = ""
        self._resources = weakref.WeakSet[ForkAware]()
        self._lock = threading.Lock()
        self._held: list[ForkAware] = []
        self._busy: list[ForkAware] = []  # in a child kept for ever: to destroy them is to use the database
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before,
                after_in_parent=lambda: self._after(in_child=False),
                after_in_child=lambda: self._after(in_child=True),
            )

    def add(self, resource: ForkAware) -> None:
        """Guard `resource` as long as it lives. Waits while the process forks."""
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


FORKS = ForkGuard()  # of this process: `os.fork()` concerns all databases
