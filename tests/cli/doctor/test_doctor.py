"""`updraft doctor` survives what it examines."""

from __future__ import annotations

import json
import shutil
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from updraft.cli.doctor.checks import check_cloud, check_packages, check_port, check_tiers, cloud_to_ask
from updraft.embedded.pocket import policy_folder
from updraft.local_engine.llama.build import REBUILD_COMMAND


def findings(done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)}


def with_fake_llama(tmp_path: Path, environment: dict[str, str], source: str) -> dict[str, str]:
    fake = tmp_path / "fake" / "llama_cpp"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(source)
    return {"PYTHONPATH": f"{fake.parent}:{environment['PYTHONPATH']}"}


def test_a_build_that_segfaults_is_reported(updraft, tmp_path, environment) -> None:
    env = with_fake_llama(tmp_path, environment, "import ctypes\nctypes.string_at(0)\n")
    done = updraft("doctor", "--json", env=env)
    assert done.returncode == 1
    check = findings(done)["llama.cpp"]
    assert check["status"] == "fail"
    assert "SIGSEGV" in check["finding"]
    assert REBUILD_COMMAND in check["fix"]


@pytest.mark.parametrize(
    "command", [("ask", "--local", "pocket", "--tier", "local", "hi"), ("serve", "--local", "pocket", "--port", "0")]
)
def test_a_build_that_segfaults_takes_no_command_down(updraft, tmp_path, environment, command) -> None:
    env = with_fake_llama(tmp_path, environment, "import ctypes\nctypes.string_at(0)\n")
    done = updraft(*command, env={**env, "UPDRAFT_OFFLINE": "1"})
    assert done.returncode > 0
    assert "SIGSEGV" in done.stderr
    assert REBUILD_COMMAND in done.stderr


def test_a_build_that_does_not_import_and_a_broken_setting_are_reported(updraft, tmp_path, environment) -> None:
    env = with_fake_llama(tmp_path, environment, "raise OSError('libllama.so: cannot open shared object file')\n")
    (tmp_path / "config.toml").write_text("qualitty = 0.9\n")
    done = updraft("doctor", "--json", env={**env, "UPDRAFT_CONFIG": str(tmp_path / "config.toml")})
    assert done.returncode == 1
    assert findings(done)["llama.cpp"]["status"] == "fail"
    assert "libllama.so" in findings(done)["llama.cpp"]["finding"]
    assert "qualitty" in findings(done)["settings"]["finding"]


def test_a_local_model_that_does_not_load_is_reported(updraft, tmp_path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    done = updraft("doctor", "--json", env={"UPDRAFT_LOCAL": str(tmp_path / "mine.gguf")})
    assert done.returncode == 1
    assert "mine.gguf cannot be used" in findings(done)["local model"]["finding"]


def test_the_working_installation_is_sound(updraft) -> None:
    done = updraft("doctor")
    assert done.returncode == 0, done.stdout
    assert "fail" not in done.stdout
    for step in ("generating a few tokens with llama.cpp", "importing torch", "reading the pocket models"):
        assert f"{step}" in done.stderr
    for name in (
        "python",
        "core",
        "edge",
        "cloud",
        "llama.cpp",
        "torch",
        "pocket models",
        "policy",
        "settings",
        "tiers",
    ):
        assert name in done.stdout


def test_a_missing_extra_is_a_warning_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.cli.doctor.checks.PACKAGES", {"edge": ("surely-not-installed",)})
    check = check_packages("edge")
    assert (check.status, check.fix) == ("warn", "pip install '.[edge]' in a clone of Updraft")


def test_a_busy_port_is_a_warning() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert check_port(busy.getsockname()[1]).status == "warn"


def test_the_cloud_is_asked_for_its_models() -> None:
    class Cloud(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("authorization") == "Bearer good"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            page = b"<html>hello</html>" if "/html" in self.path else b'{"data": [{"id": "big"}]}'
            self.wfile.write(page if allowed else b"{}")

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Cloud) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        good, bad = check_cloud(url, "good"), check_cloud(url, "bad")
        page = check_cloud(url.replace("/v1", "/html"), "good")
        server.shutdown()
    assert good.status == "ok"
    assert "big" in good.finding
    assert bad.status == "fail"
    assert "--api-key-env" in bad.fix
    assert page.status == "fail"
    assert "not OpenAI-compatible" in page.finding


def test_a_key_that_no_header_carries_is_not_shown() -> None:
    check = check_cloud("http://127.0.0.1:9/v1", "sk-secret\n")
    assert (check.status, "The API key for http://127.0.0.1:9/v1 contains a space" in check.finding) == ("fail", True)
    assert "secret" not in f"{check}"


def test_a_cloud_that_is_not_there_fails() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        check = check_cloud(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", None)
    assert check.status == "fail"


def test_variables_of_other_commands_are_no_typos(updraft) -> None:
    env = {"UPDRAFT_NODE_API_KEY": "secret", "UPDRAFT_DEVICE": "cpu", "UPDRAFT_OFFLINE": "1"}
    done = updraft("ask", "--local", "pocket", "--tier", "local", "What is 2 + 2?", env=env)
    assert done.returncode == 0, done.stderr


def test_pair_without_a_policy_gets_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-small.gguf"
    for name, value in {
        "HOME": tmp_path, "LOCAL": model, "CLOUD_URL": "http://127.0.0.1:9/v1", "CLOUD_MODEL": "big",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"UPDRAFT_{name}", str(value))
    checks = check_tiers()
    assert (checks.status, "no policy for this pair" in checks.finding) == ("warn", True)
    assert "updraft calibrate" in checks.fix
    card = tmp_path / "policies" / "pocket-small--big" / "policy.json"
    shutil.copytree(policy_folder(), card.parent)
    packaged = json.loads(card.read_text())
    card.write_text(json.dumps({**packaged, "models": {"local": "pocket-small", "cloud": "big"}}))
    assert (check_tiers().status, check_tiers().fix) == ("ok", "")
    card.unlink()
    monkeypatch.setenv("UPDRAFT_CONFIDENCE", "0.8")
    assert check_tiers().status == "ok"


def test_the_cloud_of_the_settings_is_asked_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    assert cloud_to_ask(None, None) == (None, None)
    (tmp_path / "config.toml").write_text('cloud_url = "http://h/v1"\ncloud_model = "big"\ncloud_api_key = "k"\n')
    assert cloud_to_ask(None, None) == ("http://h/v1", "k")
    assert cloud_to_ask("http://other/v1", "other") == ("http://other/v1", "other")
    (tmp_path / "config.toml").write_text("nonsense = 1\n")
    assert cloud_to_ask(None, None) == (None, None)
