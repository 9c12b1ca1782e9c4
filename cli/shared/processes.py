"""Child processes that report when they are ready and stop with their parent."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ...protocol.errors import UpdraftError
from ...protocol.safety.system import END_SIGNALS, child_environment, python_command

READY_TIMEOUT_S = 120.0
GRACE_S = 5.0
QUIET_S = 5.0  # interval of progress messages during a start


class ChildError(UpdraftError):
    """A child process did not start, or died. The message includes the end of its log."""

    type = "process_error"
    default_code = "process_failed"


class Child:
    """A `python -m MODULE` process that writes its address to a ready file.

    The process gets its own process group, so that Ctrl-C reaches only the parent, which then stops its children in
    order. If the parent dies first, `--exit-with-parent` stops the child.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: Path, *, threads: int = 1) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.ready"
        command = python_command("-m", module, *arguments, "--port", "0")
        command += ["--ready-file", str(self._ready_file), "--exit-with-parent"]
        environment = child_environment(OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, say: Callable[[str], None] = lambda _line: None) -> str:
        """Wait until the process is ready and return its address. Raises ChildError if the process dies or is too slow.

        `say` receives the elapsed time and the latest log line every few seconds.
        """
        started = reported = time.monotonic()
        deadline = started + timeout_s
        while (now := time.monotonic()) < deadline:
            if now - reported > QUIET_S:
                reported = now
                latest = self.log.read_text(errors="replace").splitlines()[-1:]
                say(": ".join([f"{self.name} has been starting for {now - started:.0f} s", *latest]))
            if self._ready_file.exists() and (url := self._ready_file.read_text().strip()):
                return url
            if not self.alive:
                raise ChildError(f"{self.name} exited with code {self._process.returncode}. {self._end_of_log()}")
            time.sleep(0.05)
        raise ChildError(f"{self.name} was not ready within {timeout_s:.0f} s. {self._end_of_log()}")

    def kill(self) -> None:
        """Send SIGKILL, to simulate a crash."""
        self._process.kill()

    def stop(self) -> None:
        """Terminate the process; kill it if it is still alive after GRACE_S seconds."""
        self.ask_to_stop()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask_to_stop(self) -> None:
        if self.alive:
            self._process.terminate()

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"The end of {self.log}:", *(f"  {line}" for line in lines)])


def stop_all(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.stop()


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and, where it exists, on SIGHUP, so that every `finally` block runs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
