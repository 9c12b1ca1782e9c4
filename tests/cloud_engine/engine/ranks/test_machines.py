"""Two machines, which are network namespaces here, serve one model; each may die, and comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from updraft.protocol.safety.system import child_environment, python_command

pytestmark = pytest.mark.slow
NAMES = f"updraft-a-{os.getpid()}", f"updraft-b-{os.getpid()}"
MASTER = "10.213.7.1"
PORT = "8100"
ENVIRONMENT = {"UPDRAFT_GROUP_KEY": "a key that both machines have", "OMP_NUM_THREADS": "1"}
RANKS = ["--model", "pocket", "--tensor-parallel", "2", "--nnodes", "2", "--restart", "--threads", "1", "--master-addr"]
ASK = f"""
import json, urllib.request
body = {{"model": "pocket-large", "prompt": "17 + 25 =", "max_tokens": 12, "temperature": 0, "ignore_eos": True}}
request = urllib.request.Request("http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(),
    {{"content-type": "application/json"}})
print(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["text"])
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two machines on one cable. Skips where this process may not create them."""
    first, second = NAMES
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    with ExitStack() as stack:
        try:
            ip("netns", "add", first)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system refuses network namespaces: {error.stderr!r}")
        stack.callback(ip, "netns", "del", first)
        ip("netns", "add", second)
        stack.callback(ip, "netns", "del", second)
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in ((first, MASTER), (second, "10.213.7.2")):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield


@contextmanager
def machine(number: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["ip", "netns", "exec", NAMES[number], *python_command("-m", "updraft", "node", *RANKS, MASTER)]
    command += ["--node-rank", str(number), "--port", PORT, "--ready-file", str(folder / "ready")]
    with (folder / f"log-{number}").open("ab") as log:
        process = subprocess.Popen(command, env=child_environment(**ENVIRONMENT), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def answer() -> str:
    asking = ["ip", "netns", "exec", NAMES[0], *python_command("-c", ASK)]
    return subprocess.run(asking, check=True, capture_output=True, text=True, timeout=600).stdout


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    while not file.exists():
        assert process.poll() is None, file.parent.joinpath("log-0").read_text()
        time.sleep(0.1)


@pytest.mark.usefixtures("namespaces")
def test_two_machines_serve_one_model_and_come_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    ENVIRONMENT["UPDRAFT_HOME"] = str(home)
    with machine(0, tmp_path) as first:
        with machine(1, tmp_path) as second:
            wait_for(tmp_path / "ready", first)
            before = answer()
            second.kill()
            second.wait()
        with machine(1, tmp_path):  # the first one has noticed that its group broke, and waits for the second one
            assert answer() == before
    assert before.strip()
