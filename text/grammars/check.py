"""Check of untrusted grammars in a child process with limits of time and memory.

Compiling a grammar can take any time and memory: `{"type": "integer", "multipleOf": 1234567}` takes half a gigabyte.
llguidance's limits do not cover every case, and its compiler cannot be interrupted. Servers therefore compile each new
constraint in a child process under limits of the operating system first, before the engine compiles it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ...protocol.decoding import prepare_types
from ...protocol.errors import EngineError, InvalidRequestError
from ...protocol.safety.bounded_cache import BoundedCache
from ...protocol.safety.system import limit_memory, limit_time, python_command
from ...protocol.structured import Constraint
from .. import sandbox
from ..fair_queue import FairQueue
from .compiler import GrammarCompiler, Vocabulary, complexity_error

CPU_SECONDS = 0.5  # limit per constraint; schemas of 100 kB take a fifth of it
MEMORY_BYTES = 512 * 2**20  # limit for the child, in addition to its memory before the first grammar
_WALL_SECONDS = 30.0  # long, because a busy machine is slow; usually the CPU limit applies first
_MAX_KNOWN = 1024
_REFUSED_SECONDS = 60.0  # refusals are cached for a short time only, because the child may have died for another reason
_MAX_WAITING = 64
_QUEUE_TIMEOUT_S = 10.0  # enough time for several constraints that reach the CPU limit
_GRACE_SECONDS = 0.2
_CHILD_GONE = (TimeoutError, asyncio.IncompleteReadError, ConnectionError)


class _Reply(msgspec.Struct):
    """Reply of the child. `refusal` is the reason why the constraint cannot be used; None: the constraint is usable."""

    refusal: str | None = None
    code: str | None = None


prepare_types(_Reply, Vocabulary, Constraint)


class GrammarCheck:
    """Checker of constraints at bounded cost, for one event loop. `close` ends the child process."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Create a checker. A thread calls `vocabulary` at the first check, as building a large one takes a second."""
        self._vocabulary = vocabulary
        self._queue = FairQueue("checks of new constraints", max_waiting=_MAX_WAITING, timeout_s=_QUEUE_TIMEOUT_S)
        self._child: asyncio.subprocess.Process | None = None
        self._known: BoundedCache[bytes, tuple[_Reply, float]] = BoundedCache(_MAX_KNOWN)  # digest -> reply, expiry

    async def check(self, constraint: Constraint, tenant: str = "") -> None:
        """Check a constraint. Raises InvalidRequestError if it is invalid or too expensive; OverloadedError if too many
        constraints are waiting, or on timeout; EngineError if the child process does not start.

        Tenants take turns, one constraint at a time, so a tenant's flood of bad constraints delays only that tenant."""
        digest = hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
        reply = self._cached_reply(digest)  # known constraints skip the queue
        if reply is None:
            async with self._queue.turn(tenant):
                reply = self._cached_reply(digest)
                if reply is None:
                    reply = await self._ask(constraint)
                    until = math.inf if reply.refusal is None else time.monotonic() + _REFUSED_SECONDS
                    self._known.put(digest, (reply, until))
        if reply.refusal is not None:
            raise InvalidRequestError(reply.refusal, param=constraint.param, code=reply.code)

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await _end(child)

    def _cached_reply(self, digest: bytes) -> _Reply | None:
        reply, until = self._known.get(digest) or (None, 0.0)
        return reply if time.monotonic() < until else None

    async def _ask(self, constraint: Constraint) -> _Reply:
        try:
            child = self._child = self._child or await self._start()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(_frame(constraint))
            return msgspec.msgpack.decode(await asyncio.wait_for(_read(child.stdout), _WALL_SECONDS), type=_Reply)
        except _CHILD_GONE:
            await self.close()  # the child was killed by its limits, or is stuck
            why = f"compilation takes over {CPU_SECONDS:g} s or {MEMORY_BYTES // 2**20} MB: simplify the constraint."
            refusal = complexity_error(constraint, why)
            return _Reply(refusal.message, refusal.code)
        except BaseException:  # after a cancellation, the next caller must not read this reply
            await self.close()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            *python_command("-m", __name__),
            env=sandbox.environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(_frame(await asyncio.to_thread(self._vocabulary)))
            await asyncio.wait_for(_read(child.stdout), _WALL_SECONDS)  # the child's ready message
        except _CHILD_GONE as error:
            code = await _end(child)
            why = f"Constraints cannot be checked: the checker process exited at startup (code {code})."
            raise EngineError(why) from error
        except BaseException:
            await _end(child)
            raise
        return child


async def _end(child: asyncio.subprocess.Process) -> int:
    """End the child and return its exit code. Kills only a child that is still running after its input was closed,
    since killing an exited child would lose the exit code."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _GRACE_SECONDS)
    finally:
        if child.returncode is None:
            child.kill()
    return await child.wait()


def _frame(message: object) -> bytes:
    return sandbox.frame(msgspec.msgpack.encode(message))


async def _read(stream: asyncio.StreamReader) -> bytes:
    (length,) = sandbox.LENGTH.unpack(await stream.readexactly(sandbox.LENGTH.size))
    return await stream.readexactly(length)


# Functions of the child process.


def main() -> None:
    """Read the vocabulary, then check constraints until the input ends."""
    sandbox.prepare()
    vocabulary = msgspec.msgpack.decode(sandbox.receive(), type=Vocabulary)
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.compile(Constraint("regex", "a", "the first"))  # builds the vocabulary's trie before the limits apply
    limit_memory(MEMORY_BYTES)
    sandbox.send(msgspec.msgpack.encode(_Reply()))  # tells the parent that the child is ready
    while message := sandbox.receive():
        constraint = msgspec.msgpack.decode(message, type=Constraint)
        limit_time(CPU_SECONDS)
        reply = _Reply()
        try:
            compiler.compile(constraint)
        except InvalidRequestError as error:
            reply = _Reply(error.message, error.code)
        limit_time(0)
        sandbox.send(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
