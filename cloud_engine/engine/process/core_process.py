"""One engine core as its server sees it: a child process, what it reports, and how it ended."""

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
from ....protocol.safety.python_process import child_environment, python_command
from ....protocol.safety.system import KILL, socket_address, socket_folder
from ....protocol.safety.terminal_text import printable
from .messages import Alive, Close, Command, Down, Load, Ready, Report, decode_report, encode_command

COMMANDS = "commands"
REPORTS = "reports"
HEARTBEAT_S = 0.5
"""Between two signs of life."""
HUNG_S = 10.0
"""Without a sign of life for so long, a core is hung. Only once it is loaded: a slow disk stops every thread."""

_POLL_MS = 100
_STOP_S = 2.0
_LAST_LINES = 3
_MAX_OUTPUT = 500  # characters


class CoreProcess:
    """Starts with its construction and ends with `close`, from one thread; `send` and `stop` are for any.

    The sockets lie in a folder that nobody else can enter. The output of the core goes to our stderr. The core is in a
    process group of its own, so that Ctrl-C reaches only us.
    """

    def __init__(self, load: Load) -> None:
        self._folder = socket_folder("updraft-core-", COMMANDS)
        self._context = zmq.Context()
        self._lock = threading.Lock()  # sockets are not for several threads at once
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
        """Without waiting; to a core that has ended, nothing is sent. Raises InvalidRequestError."""
        data = encode_command(command)
        with self._lock:
            if not self._commands.closed:
                self._commands.send(data)

    def reports(self) -> Iterator[Report]:
        """The core's reports, up to its end. The last is always a `Down`, whatever the core died of."""
        silent_s = 0.0
        while True:
            dead = self._process.poll() is not None
            if self._reports.poll(_POLL_MS):
                silent_s = 0.0
                report = decode_report(self._reports.recv())
                self._loaded = self._loaded or isinstance(report, Ready)
                if not isinstance(report, Alive):
                    yield report
                if isinstance(report, Down):
                    return
            elif dead:  # and what it printed before has been read
                yield Down(EngineError(self._cause()))
                return
            else:
                silent_s += _POLL_MS / 1000
                if self._loaded and silent_s > HUNG_S:
                    yield Down(EngineError(f"its process gave no sign of life for {HUNG_S:.0f} s"))
                    return

    def stop(self) -> None:
        """Ask it to end, and see to it."""
        self.send(Close())
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """End the process at once, if it has not ended, and clean up behind it."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._commands.close()
        self._reports.close()
        self._context.term()
        assert self._process.stdin is not None, "Popen made a pipe"
        self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None, "Popen made a pipe"
        with self._process.stdout as lines:
            for line in lines:
                text = printable(line.decode("utf-8", "replace"))
                sys.stderr.write(text)
                self._printed.append(text.strip())

    def _cause(self) -> str:
        code = self._process.wait()
        if code == -KILL:
            return "its process was killed by SIGKILL, as the system does when memory runs out"
        self._echo.join(_POLL_MS / 1000)  # its last lines may still be on their way
        printed = " / ".join(filter(None, self._printed))[:_MAX_OUTPUT]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        return f"its process {how}" + (f" and said: {printed}" if printed else "")
