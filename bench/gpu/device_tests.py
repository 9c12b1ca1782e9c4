"""The tests that need a CUDA device, every file in a process of its own, all at once.

Most of their time goes into compiling kernels, which one process does one by one; a GPU's machine has more processors.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...protocol.safety.python_process import child_environment, python_command

_NOTHING_RAN = 5  # pytest's exit status


def main(folders: Sequence[str]) -> int:
    """0 if there are tests and all of them pass. The output of each file is shown whole, as it ends."""
    files = sorted(str(path) for folder in folders for path in Path(folder).glob("test_*.py"))
    with tempfile.TemporaryDirectory(prefix="updraft-gpu-tests-") as folder:
        logs = [Path(folder) / str(number) for number in range(len(files))]
        running = [_start(file, log) for file, log in zip(files, logs, strict=True)]
        statuses: list[int] = []
        for process, log in zip(running, logs, strict=True):
            statuses.append(process.wait())
            sys.stderr.write(log.read_text())
            sys.stderr.flush()
    return max(statuses, default=_NOTHING_RAN)


def _start(file: str, log: Path) -> subprocess.Popen[bytes]:
    """As part of this process's group, with which it is stopped."""
    words = python_command("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", file)
    with log.open("wb") as output:
        return subprocess.Popen(words, env=child_environment(), stdout=output, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
