"""The transport between an engine loop and its server: queues of a thread, or sockets of a process."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .messages import Command, Report


class CoreTransport(ABC):
    @abstractmethod
    def next_command(self, wait: bool) -> Command | None:
        """Return the next command. If none is pending, wait for one, or return None if `wait` is false."""

    @abstractmethod
    def report(self, what: Report) -> None:
        """Send a report without waiting."""

    @abstractmethod
    def send_back(self, command: Command) -> None:
        """Queue a command for `next_command`. May be called from any thread."""
