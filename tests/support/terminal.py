"""Runs a command at a pseudo-terminal, types answers to its prompts, and returns everything that it shows."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MAX_WAIT_S = 60


def at_terminal(
    arguments: Sequence[str], answers: Sequence[tuple[str, str]], environment: dict[str, str], folder: Path
) -> tuple[int, str]:
    """Run `updraft ARGUMENTS`, and return its exit code and output. `answers`: prompts and replies, in order."""
    ours, theirs = pty.openpty()
    # Makes the pseudo-terminal the controlling terminal of a new session: prompts for a key then cannot use another
    # terminal, and Ctrl-C ends the command.
    ours_alone = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    program = f"{ours_alone}from updraft.cli.main import main; sys.argv[0] = 'updraft'; main()"
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True
    ) as process:
        os.close(theirs)
        shown, looked, remaining = b"", 0, list(answers)
        try:
            while select.select([ours], [], [], _MAX_WAIT_S)[0]:
                shown += os.read(ours, 4096)
                if remaining and (position := shown.find(remaining[0][0].encode(), looked)) >= 0:
                    looked = position + len(remaining[0][0])
                    os.write(ours, remaining.pop(0)[1].encode() + b"\n")
        except OSError:  # the process has ended and closed its terminal
            pass
        else:
            process.kill()
        finally:
            os.close(ours)
    return process.returncode, shown.decode(errors="replace")
