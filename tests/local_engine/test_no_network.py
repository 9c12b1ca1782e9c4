"""The local tier alone makes no network call: a process in which sockets are forbidden answers all the same."""

import shutil
import subprocess
import sys
from pathlib import Path

from updraft.embedded import pocket

_FORBID = """
import sys

def forbid(event, arguments):
    if event.split(".")[0] == "socket" and event != "socket.__new__":  # an event loop talks to itself over a pair
        raise RuntimeError(f"network: {event} {arguments}")

sys.addaudithook(forbid)
"""

_ANSWER = """
import asyncio
import sys
from pathlib import Path
from updraft.embedded import pocket
from updraft.local_engine.opening import open_engine
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint

question = [Message("user", "What is 3 + 4?")]
with open_engine(Path(sys.argv[1]), sound=pocket.pocket_small_gguf()) as engine:
    print(len(list(engine.start(question, SamplingParams(temperature=0, max_tokens=8)))) > 0)
    digits = Constraint("regex", "[0-9]{3}", "structured_outputs")
    print(len(list(engine.start(question, SamplingParams(max_tokens=8, logprobs=3), constraint=digits))))

    async def ask():
        return [token async for token in engine.start(question, SamplingParams(max_tokens=8))]

    print(len(asyncio.run(ask())) > 0)
"""

_CONNECT = """
import socket
socket.create_connection(("127.0.0.1", 9), timeout=1)
"""


def run(code: str, model: Path, home: Path) -> subprocess.CompletedProcess[str]:
    (home / "sitecustomize.py").write_text(_FORBID)  # read by every Python below: trials have processes of their own
    return subprocess.run(
        [sys.executable, "-c", code, str(model)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={"UPDRAFT_HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([str(home), *sys.path])},
    )


def test_answers_without_sockets(tmp_path) -> None:
    """With the file unknown, so that all checks and trials of it run, too."""
    model = tmp_path / "model.gguf"
    shutil.copy(pocket.pocket_small_gguf(), model)
    done = run(_ANSWER, model, tmp_path)
    assert done.returncode == 0, done.stderr
    first, constrained, asynchronous = done.stdout.split()
    assert (first, asynchronous) == ("True", "True") and int(constrained) > 0


def test_the_ban_would_be_noticed(tmp_path) -> None:
    done = run(_CONNECT, pocket.pocket_small_gguf(), tmp_path)
    assert done.returncode != 0 and "network: socket." in done.stderr
