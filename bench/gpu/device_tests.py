"""Runs the tests that need a CUDA device: one process per file, all at once.

Kernel compilation takes most of the time and uses one processor per process, so several processes are faster.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...protocol.safety.system import child_environment, python_command

_NOTHING_RAN = 5  # pytest's exit status if no test ran


def main(folders: Sequence[str]) -> int:
    """Run the tests; return 0 if there are tests and all pass. The output of each file is shown when its tests end."""
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
    """Start pytest on `file`, in this process's group, so that a signal to the group stops pytest too."""
    words = python_command("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", file)
    with log.open("wb") as output:
        return subprocess.Popen(words, env=child_environment(), stdout=output, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
