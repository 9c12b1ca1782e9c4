"""The server's handle to an engine core: starts the child process, reads its reports and explains its exit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

import zmq

from ....protocol.errors import EngineError
from ....protocol.safety.redaction import printable
from ....protocol.safety.system import KILL, child_environment, python_command, socket_address, socket_folder
from .messages import AliveReport, Close, Command, DownReport, Load, ReadyReport, Report, decode_report, encode_command

COMMANDS = "commands"
REPORTS = "reports"
HEARTBEAT_S = 0.5
"""Interval between heartbeats, in seconds."""
HUNG_S = 10.0
"""Seconds without a heartbeat after which a loaded core counts as hung; a loading core may stall on a slow disk."""

_POLL_MS = 100
_STOP_S = 2.0
_LAST_LINES = 3
_MAX_OUTPUT = 500  # characters of the core's output to quote in an error


class CoreProcess:
    """A core process, started by the constructor and ended by `close`. `send` and `stop` are thread-safe.

    The sockets are in a folder that only this user can access. The core's output is copied to stderr. The core has its
    own process group, so that Ctrl-C reaches only the server.
    """

    def __init__(self, load: Load) -> None:
        self._folder = socket_folder("updraft-core-", COMMANDS)
        self._context = zmq.Context()
        self._lock = threading.Lock()  # ZeroMQ sockets are not thread-safe
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._reports):
            socket.set_hwm(0)
            socket.linger = 0
        self._reports.bind(socket_address(self._folder / REPORTS))
        self._commands.connect(socket_address(self._folder / COMMANDS))
        self._process = subprocess.Popen(
            python_command("-m", f"{__package__}.core_main", str(self._folder)),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._loaded = False
        self._printed: deque[str] = deque(maxlen=_LAST_LINES)
        self._echo = threading.Thread(target=self._pass_on, name="updraft-core-output", daemon=True)
        self._echo.start()
        self.send(load)

    def send(self, command: Command) -> None:
        """Send a command without waiting; do nothing after `close`. Raises InvalidRequestError (`encode_command`)."""
        data = encode_command(command)
        with self._lock:
            if not self._commands.closed:
                self._commands.send(data)

    def reports(self) -> Iterator[Report]:
        """Yield the core's reports until it ends. The last one is always a `DownReport`, however the core ended."""
        silent_s = 0.0
        while True:
            dead = self._process.poll() is not None
            if self._reports.poll(_POLL_MS):
                silent_s = 0.0
                report = decode_report(self._reports.recv())
                self._loaded = self._loaded or isinstance(report, ReadyReport)
                if not isinstance(report, AliveReport):
                    yield report
                if isinstance(report, DownReport):
                    return
            elif dead:  # the process has ended, and all its reports are read
                yield DownReport(EngineError(self._cause()))
                return
            else:
                silent_s += _POLL_MS / 1000
                if self._loaded and silent_s > HUNG_S:
                    yield DownReport(EngineError(f"the engine's process sent no heartbeat for {HUNG_S:.0f} s"))
                    return

    def stop(self) -> None:
        """Ask the core to end, and kill it if it does not end in time."""
        self.send(Close())
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """Kill the process if it still runs, and release its sockets and folder."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._commands.close()
        self._reports.close()
        self._context.term()
        assert self._process.stdin is not None, "Popen creates a pipe for PIPE"
        self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None, "Popen creates a pipe for PIPE"
        with self._process.stdout as lines:
            for line in lines:
                text = printable(line.decode("utf-8", "replace"))
                sys.stderr.write(text)
                self._printed.append(text.strip())

    def _cause(self) -> str:
        code = self._process.wait()
        if code == -KILL:
            return "the engine's process was killed by SIGKILL, possibly because the system ran out of memory"
        self._echo.join(_POLL_MS / 1000)  # wait for the last lines of output
        printed = " / ".join(filter(None, self._printed))[:_MAX_OUTPUT]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the engine's process {how}" + (f"; last output: {printed}" if printed else "")
