"""Renders a chat template in a child process of its own, which its limits may end: templates are programs of strangers.

A template has its own child, so that a hostile one harms nobody else's requests. The child starts with the first use
and is kept; one that ended is replaced. It is a new process, never a fork: this one may have threads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...protocol.errors import EngineError, InvalidRequestError, ModelLoadError
from ...protocol.safety.python_process import python_command
from .. import child as child_process

LIMIT_CODE = "template_too_expensive"
_CHILD = f"{__package__}.render_child"
_MAX_SOURCE = 2**18  # characters; the longest real ones have 30,000
_GRACE_SECONDS = 5.0  # for a child that closed its output to end, too


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one request to the child process."""

    cpu_seconds: float = 1.0  # for all its renderings, or for compiling; real templates take milliseconds
    wall_seconds: float = 30.0  # a machine may be busy; CPU time is what counts
    memory_bytes: int = 512 * 2**20  # beyond what the process has before it sees the template; held to on Linux only
    output_characters: int = 8 * 2**20  # of all texts, beyond the size of what the template is given


@dataclass(frozen=True, slots=True)
class Rendered:
    """The outcome of one context, or of the whole message. `failure`: why there is no text."""

    text: str = ""
    failure: Literal["refused", "failed", "stopped"] | None = None
    why: str = ""

    @property
    def error(self) -> InvalidRequestError:
        """The error for the client."""
        how = {"refused": "refused the messages", "failed": "failed on these messages"}.get(self.failure or "")
        why = f"The model's chat template {how or 'was stopped'}: {self.why}"
        return InvalidRequestError(why, param="messages", code=None if how else LIMIT_CODE)


class Renderer:
    """One template and its child process. Thread-safe: threads take turns."""

    def __init__(self, source: str, limits: RenderLimits) -> None:
        """Raises ModelLoadError for one that is longer than any template is."""
        if len(source) > _MAX_SOURCE:
            raise ModelLoadError(
                f"The model's chat template has {len(source):,} characters; at most {_MAX_SOURCE:,} are read. "
                "Give another one with --chat-template."
            )
        self._limits = limits
        self._first = encoded({"source": source, "limits": asdict(self._limits)})
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Renderer] | None = None

    def compile(self) -> None:
        """Have the child ready. Raises ModelLoadError if the template is not valid, EngineError if no child starts."""
        with self._turn:
            self._ready_child()

    def render(self, contexts: Sequence[dict[str, Any]]) -> list[str]:
        """The text for each context, in one round trip. Raises as `attempt` does, and where the template refuses a
        context or fails on it."""
        attempts = self.attempt(contexts)
        for attempt in attempts:
            if attempt.failure is not None:
                raise attempt.error
        return [attempt.text for attempt in attempts]

    def attempt(self, contexts: Sequence[dict[str, Any]]) -> list[Rendered]:
        """The outcome of each context, in one round trip.

        Raises InvalidRequestError where the template exceeds its limits for all of them together, and as `compile`
        does.
        """
        message = encoded(contexts)
        with self._turn:
            reply = self._ask(self._ready_child(), message)
        if isinstance(reply, Rendered):
            raise reply.error
        return reply

    def close(self) -> None:
        """End the child. A later use starts another one."""
        with self._turn:
            self._end()

    def _ready_child(self) -> subprocess.Popen[bytes]:
        """A child that has compiled the template. One that ended while it was idle is replaced."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        child = self._child = _start()
        self._finalizer = weakref.finalize(self, _stop, child)
        reply = self._ask(child, self._first, encoded([]))  # nothing to render: it compiles
        if not isinstance(reply, Rendered):
            return child
        if (child.returncode or 0) > 0:  # by itself: a limit ends it by a signal
            raise EngineError(f"Chat templates cannot be rendered: {reply.why} at its start.")
        self._end()
        how = "cannot be compiled" if reply.failure == "stopped" else "is not valid Jinja"
        raise ModelLoadError(f"The model's chat template {how}: {reply.why.removesuffix('.')}.")

    def _ask(self, child: subprocess.Popen[bytes], *messages: bytes) -> list[Rendered] | Rendered:
        """The child's reply: one for each context, or one failure.

        The child does not survive its limits, nor a caller who leaves before the reply.
        """
        try:
            reply = _exchange(child, messages)
        except BaseException:
            self._end()
            raise
        if reply is None:
            reply = Rendered(failure="stopped", why=self._cause(child))
        if isinstance(reply, Rendered) and reply.failure == "stopped":
            self._end()
        return reply

    def _cause(self, child: subprocess.Popen[bytes]) -> str:
        """The reason why it ended without a reply."""
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
        number = -(child.returncode or 0)
        name = signal.Signals(number).name if number > 0 else f"code {-number}"
        if name == "SIGPROF":
            return f"it computes for more than {self._limits.cpu_seconds:g} s"
        if name == "SIGALRM":
            return f"it was not done within {self._limits.wall_seconds:g} s"
        return f"its process ended with {name}"

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def encoded(value: object) -> bytes:
    """JSON, which unlike msgpack holds integers of any size: arguments of calls are as a model wrote them."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command("-m", _CHILD), env=child_process.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise EngineError(f"Chat templates cannot be rendered: no process for it can be started ({error}).") from error


def _exchange(child: subprocess.Popen[bytes], messages: Sequence[bytes]) -> list[Rendered] | Rendered | None:
    """The one reply to `messages`; None if the child ended instead."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b"".join(map(child_process.frame, messages)))
        child.stdin.flush()
    except OSError:
        return None
    reply = child_process.read(child.stdout)
    found = json.loads(reply) if reply else None
    return [Rendered(**each) for each in found] if isinstance(found, list) else found and Rendered(**found)


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.kill()
    child.wait()
    child.stdout.close()
    with suppress(OSError):  # what it did not read any more
        child.stdin.close()
