"""Rendering of chat templates, which are untrusted programs, in child processes with limits of time and memory.

Each template has its own child, so that a hostile template cannot harm other requests. The child starts at the first
use and is replaced if it has exited. It is a new process, not a fork, because the parent may have threads.
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
from ...protocol.safety.system import python_command
from .. import sandbox

LIMIT_CODE = "template_too_expensive"
_CHILD = f"{__package__}.render_child"
_MAX_SOURCE = 2**18  # maximum characters; the longest known templates have 30,000
_GRACE_SECONDS = 5.0  # time for a child to exit after closing its output


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one request to the child process."""

    cpu_seconds: float = 1.0  # CPU time to compile, or to render all contexts; usual templates take milliseconds
    wall_seconds: float = 30.0  # limit for a hanging child; long, because a busy machine is slow
    memory_bytes: int = 512 * 2**20  # memory in addition to that before the template is loaded; Linux only
    output_characters: int = 8 * 2**20  # length of all texts together, beyond the size of the input


@dataclass(frozen=True, slots=True)
class RenderResult:
    """Result of rendering one context, or failure of a whole request (`failure`: its kind, `why`: the reason)."""

    text: str = ""
    failure: Literal["refused", "failed", "stopped"] | None = None
    why: str = ""

    @property
    def error(self) -> InvalidRequestError:
        """The failure as an exception for the client."""
        how = {"refused": "refused the messages", "failed": "failed on these messages"}.get(self.failure or "")
        why = f"The model's chat template {how or 'was stopped'}: {self.why}"
        return InvalidRequestError(why, param="messages", code=None if how else LIMIT_CODE)


class Renderer:
    """Template and its child process. Thread-safe: threads take turns."""

    def __init__(self, source: str, limits: RenderLimits) -> None:
        """Set up the template without starting the child. Raises ModelLoadError if the source is too long."""
        if len(source) > _MAX_SOURCE:
            raise ModelLoadError(
                f"The model's chat template has {len(source):,} characters; the limit is {_MAX_SOURCE:,}. "
                "Set another template with --chat-template."
            )
        self._limits = limits
        self._first = encoded({"source": source, "limits": asdict(self._limits)})
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Renderer] | None = None

    def compile(self) -> None:
        """Start the child and compile the template. Raises ModelLoadError if invalid, EngineError if no child runs."""
        with self._turn:
            self._ready_child()

    def render(self, contexts: Sequence[dict[str, Any]]) -> list[str]:
        """Render the template with each of `contexts` in one request to the child. Raises the errors of `attempt`, and
        InvalidRequestError if the template refuses or fails on a context."""
        attempts = self.attempt(contexts)
        for attempt in attempts:
            if attempt.failure is not None:
                raise attempt.error
        return [attempt.text for attempt in attempts]

    def attempt(self, contexts: Sequence[dict[str, Any]]) -> list[RenderResult]:
        """Render the template with each of `contexts` (its variables) in one request; return the outcome of each.

        Raises InvalidRequestError if the contexts together exceed the limits, and the errors of `compile`.
        """
        message = encoded(contexts)
        with self._turn:
            reply = self._ask(self._ready_child(), message)
        if isinstance(reply, RenderResult):
            raise reply.error
        return reply

    def close(self) -> None:
        """End the child; the next use starts a new one."""
        with self._turn:
            self._end()

    def _ready_child(self) -> subprocess.Popen[bytes]:
        """Return a running child that has compiled the template, replacing a child that has exited."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        child = self._child = _start()
        self._finalizer = weakref.finalize(self, _stop, child)
        reply = self._ask(child, self._first, encoded([]))  # empty message: compile only
        if not isinstance(reply, RenderResult):
            return child
        if (child.returncode or 0) > 0:  # the child failed to start; exceeded limits would end the child by a signal
            raise EngineError(f"Chat templates cannot be rendered: {reply.why} at startup.")
        self._end()
        how = "cannot be compiled" if reply.failure == "stopped" else "is not valid Jinja"
        raise ModelLoadError(f"The model's chat template {how}: {reply.why.removesuffix('.')}.")

    def _ask(self, child: subprocess.Popen[bytes], *messages: bytes) -> list[RenderResult] | RenderResult:
        """Send messages to the child; return all outcomes, or one failure. A failure or interrupt ends the child."""
        try:
            reply = _exchange(child, messages)
        except BaseException:
            self._end()
            raise
        if reply is None:
            reply = RenderResult(failure="stopped", why=self._cause(child))
        if isinstance(reply, RenderResult) and reply.failure == "stopped":
            self._end()
        return reply

    def _cause(self, child: subprocess.Popen[bytes]) -> str:
        """Return the reason why the child exited without a reply."""
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
        number = -(child.returncode or 0)
        name = signal.Signals(number).name if number > 0 else f"code {-number}"
        if name == "SIGPROF":
            return f"the template took more than {self._limits.cpu_seconds:g} s of CPU time"
        if name == "SIGALRM":
            return f"the template did not finish within {self._limits.wall_seconds:g} s"
        return f"the rendering process exited with {name}"

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def encoded(value: object) -> bytes:
    """Encode as JSON, which unlike msgpack supports integers of any size, as in arguments written by a model."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command("-m", _CHILD), env=sandbox.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise EngineError(f"Chat templates cannot be rendered: the child process did not start ({error}).") from error


def _exchange(child: subprocess.Popen[bytes], messages: Sequence[bytes]) -> list[RenderResult] | RenderResult | None:
    """Send `messages` and return the reply to them; None if the child exited instead."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b"".join(map(sandbox.frame, messages)))
        child.stdin.flush()
    except OSError:
        return None
    reply = sandbox.read(child.stdout)
    value = json.loads(reply) if reply else None
    return [RenderResult(**each) for each in value] if isinstance(value, list) else value and RenderResult(**value)


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.kill()
    child.wait()
    child.stdout.close()
    with suppress(OSError):  # `close` flushes input that the killed child never read
        child.stdin.close()
