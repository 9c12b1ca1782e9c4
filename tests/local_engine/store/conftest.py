"""A library of the test's own, no settings but the test's, and waits too short to be felt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from model_hub import Hub, running, tiny_gguf
from updraft.local_engine.store.library import Library
from updraft.model_files.download.web import RetryLimits

HURRY = RetryLimits(connect_s=2, read_s=2, tries=4, backoff_s=0.01, window_s=10, worthwhile=10_000)
MODEL = tiny_gguf()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("UPDRAFT_OFFLINE", "HF_HUB_OFFLINE", "UPDRAFT_MODELS", "UPDRAFT_CONFIG", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "models")


@pytest.fixture
def retries() -> RetryLimits:
    return replace(HURRY)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository of one model, and the same file on the web."""
    with running(Hub({"owner/repo": {"tiny-Q8_0.gguf": MODEL}}, {"/files/tiny.gguf": MODEL})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
