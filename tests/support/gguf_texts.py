"""Opens model files as an app does and writes many texts to each, in a process that may die: how each ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60
UNITS = ("a", "aA", "a ", "1", ".", " ", "\t", "\r\n", "\n", "中", "é", "e\u0301", "🙂", "'", "a.1")


def converse(paths: Sequence[Path], *, examples: int, longest: int) -> list[str]:
    """For each file: "refused: ..." by its trial, "" if every text had an answer or a typed error, or "crash: SIGSEGV".

    `examples`: random texts for each file. `longest`: characters of the runs.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([[str(path) for path in paths], examples, longest]),
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import hypothesis  # noqa: F401 - once, before the forks
    from updraft.local_engine.llama.library import llama
    from updraft.local_engine.machine.child_process import expect_crashes

    expect_crashes()
    llama()
    paths, examples, longest = json.loads(sys.stdin.read())
    sys.stdout.write("\n" + json.dumps([_end_of(Path(path), examples, longest) for path in paths]) + "\n")


def _end_of(path: Path, examples: int, longest: int) -> str:
    from updraft.local_engine.trial_load import attempt

    refused = _in_fork(lambda: attempt(path))
    return f"refused: {refused}" if refused else _in_fork(lambda: _write_texts(path, examples, longest))


def _write_texts(path: Path, examples: int, longest: int) -> str:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from updraft.local_engine.engine import LocalEngine, LocalOptions
    from updraft.protocol.errors import UpdraftError
    from updraft.protocol.requests import Message
    from updraft.protocol.sampling import SamplingParams

    with LocalEngine.load(path, LocalOptions(context_length=128, threads=1)) as engine:

        @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.text(st.characters(codec="utf-8"), max_size=60) | st.text("<|>s/0xF1\u2581 \0\n", max_size=20))
        def write(content: str) -> None:
            with suppress(UpdraftError):
                for _ in engine.start([Message("user", content)], SamplingParams(max_tokens=2)):
                    pass
            for special in (False, True):
                with suppress(UpdraftError):
                    engine.encode(content, allow_special=special)

        write()
        for unit in UNITS:
            with suppress(UpdraftError):
                engine.encode((unit * longest)[:longest])
    return ""


def _in_fork(work) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - what is to be found
            outcome = f"untyped: {error!r}"
        os.write(writer, b"." + outcome.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as end:
        outcome = end.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
    return outcome[1:] if outcome else f"crash: code {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    main()
