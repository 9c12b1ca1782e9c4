"""Models of the device on the command line: fetched, listed, used by name, checked, deleted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psutil
import pytest
from model_hub import Hub, running, tiny_gguf
from package_index import Index, wheel
from package_index import running as running_index
from terminal import at_terminal

ROOT = Path(__file__).resolve().parents[3]
MODEL = tiny_gguf()
NAME = "hf:owner/repo:Q8_0"


@pytest.fixture
def hub(environment: dict[str, str], tmp_path: Path) -> Iterator[Hub]:
    """A hub that the command finds, without anybody's token."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
    with running(Hub({"owner/repo": {"m-Q8_0.gguf": MODEL, "m-Q4_0.gguf": tiny_gguf(seed=1)}})) as server:
        environment.update(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / "hf"))
        yield server


def test_from_the_hub_to_the_bin(hub: Hub, updraft, tmp_path: Path) -> None:
    done = updraft("pull", NAME)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.read_bytes() == MODEL
    assert all(word in done.stderr for word in ("apache-2.0", "0.2 MB", "sha256", "free", "--local m-Q8_0"))
    (entry,) = json.loads(updraft("models", "--json").stdout)
    assert (entry["name"], entry["state"], entry["licence"]) == ("m-Q8_0", "ready", "apache-2.0")
    assert (entry["source"], entry["path"], entry["size"]) == ("hf:owner/repo:m-Q8_0.gguf", str(path), len(MODEL))
    assert "m-Q8_0" in updraft("models").stdout
    assert updraft("verify").stdout.split() == ["ok", "m-Q8_0"]
    path.write_bytes(MODEL[:-1] + b"?")
    bad = updraft("verify", "m-Q8_0")
    assert (bad.returncode, "damaged" in bad.stdout) == (1, True)
    assert updraft("rm", "m-Q8_0").returncode == 0
    assert not path.exists()
    assert json.loads(updraft("models", "--json").stdout) == []


def test_verify_says_that_there_is_nothing_to_verify(updraft) -> None:
    done = updraft("verify")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("There are no models in ")
    assert json.loads(updraft("verify", "--json").stdout) == []


def test_every_step_as_json(updraft, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(MODEL)
    pulled = json.loads(updraft("pull", str(file), "--json").stdout)
    assert (pulled["name"], pulled["state"], pulled["size"]) == ("mine", "ready", len(MODEL))
    assert json.loads(updraft("models", "--json").stdout) == [pulled]
    assert json.loads(updraft("verify", "--json").stdout) == [{"name": "mine", "state": "ready"}]
    (deleted,) = json.loads(updraft("rm", "mine", "--json").stdout)
    assert deleted["name"] == "mine"
    assert deleted["freed"] >= len(MODEL)


def test_a_pulled_model_answers(updraft) -> None:
    pytest.importorskip("llama_cpp")
    packaged = ROOT / "embedded" / "weights" / "pocket-small.gguf"
    assert updraft("pull", str(packaged), "--name", "mine").returncode == 0
    done = updraft("ask", "What is 17 + 25?", "--local", "mine", "--tier", "local", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["updraft"]["tier"] == "local"


@pytest.mark.parametrize(
    ("arguments", "env", "printed"),
    [
        (["pull", "hf:owner/repo"], {}, "m-Q4_0.gguf"),
        (["pull", "hf:owner/repo:Q2_K"], {}, "holds no Q2_K"),
        (["pull", NAME], {"UPDRAFT_OFFLINE": "1"}, "the network is forbidden"),
        (["pull", NAME, "--name", "../../x"], {}, "cannot be called"),
        (["pull", "http://example.org/x.gguf"], {}, "use https://"),
        (["pull", "absent.gguf"], {}, "There is no file"),
        (["rm", "../x"], {}, "cannot be called"),
        (["rm", "absent"], {}, "There is no model 'absent'"),
        (["verify", "absent"], {}, "There is no model 'absent'"),
        (["ask", "hi", "--local", "absent"], {}, "There is no local model 'absent'"),
    ],
)
def test_refusals(hub: Hub, in_process, arguments: list[str], env: dict[str, str], printed: str) -> None:
    done = in_process(*arguments, env=env)
    assert done.returncode in (1, 2)
    assert printed in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_token_is_shown_to_nobody(hub: Hub, updraft) -> None:
    """Nor sent to the storage that the hub redirects to."""
    with running(Hub(files=hub.files, cuts=1), "127.0.0.2") as storage:
        hub.other = storage.url
        done = updraft("pull", NAME, env={"HF_TOKEN": "hf_verysecret", "UPDRAFT_DEBUG": "1", "HF_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    assert hub.bodies[0].headers["authorization"] == "Bearer hf_verysecret"
    assert "authorization" not in storage.received[0].headers
    assert "hf_verysecret" not in done.stdout + done.stderr


def test_ctrl_c_is_no_traceback_and_the_next_pull_continues(hub: Hub, environment, updraft, tmp_path: Path) -> None:
    hub.pause_s = 0.1
    command = [sys.executable, "-m", "updraft", "pull", NAME]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    part = tmp_path / "home" / "models" / ".partial" / "m-Q8_0.part"
    while not part.exists() or part.stat().st_size < 40_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Repeat the command to resume" in printed
    assert "Traceback" not in printed
    (entry,) = json.loads(updraft("models", "--json").stdout)
    assert (entry["state"], entry["size"]) == ("partial", part.stat().st_size)
    hub.pause_s = 0.0
    assert updraft("pull", NAME).returncode == 0
    assert hub.bodies[-1].start == entry["size"]


def test_ctrl_c_ends_pip_as_well(environment, tmp_path: Path) -> None:
    name, data = wheel("a-model", "1.0", {"m.gguf": MODEL})
    with running_index(Index({"a-model": {name: data}}, ending=Event())) as index:
        command = [sys.executable, "-m", "updraft", "pull", "pypi:a-model"]
        settings = {**environment, **index.settings}
        process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        while not any(path.startswith("/files/") for path in index.received):
            assert process.poll() is None
            time.sleep(0.01)
        (pip,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
        index.ending.set()
    assert process.returncode == 130
    assert "Repeat the command to start again" in printed
    assert not pip.is_running()
    assert not list((tmp_path / "home" / "models").rglob("*.wheel"))


@pytest.mark.parametrize(("answer", "flags", "comes"), [("n", [], False), ("y", [], True), ("", ["--yes"], True)])
def test_a_terminal_is_asked(hub: Hub, environment, tmp_path: Path, answer: str, flags: list[str], comes: bool) -> None:
    answers = [("[Y/n]", answer)] if answer else []
    code, shown = at_terminal(["pull", NAME, *flags], answers, environment, tmp_path)
    assert (code == 0) is comes
    assert bool(hub.bodies) is comes
    assert "apache-2.0" in shown
    assert ("Download it?" in shown) is not bool(flags)
