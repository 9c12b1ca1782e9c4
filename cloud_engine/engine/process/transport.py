"""The way of commands to an engine's loop and of its reports away: queues of a thread, or sockets of a process."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .messages import Command, Report


class CoreTransport(ABC):
    @abstractmethod
    def next_command(self, wait: bool) -> Command | None:
        """Without `wait`, None if there is none yet."""

    @abstractmethod
    def report(self, what: Report) -> None:
        """Without waiting for anybody."""

    @abstractmethod
    def send_back(self, command: Command) -> None:
        """Let `next_command` bring this. May be called from any thread."""
