"""Headless Chromium, and a daemon whose page it opens. Without Chromium or Playwright, tests are skipped."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import serving
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

KEY = "a-key"
# `make test` installs Playwright in this folder, because it is too large for the environment of every test.
sys.path.append(str(Path(__file__).parents[2] / "out" / "browser"))


def streamed(text: str) -> tuple[int, bytes]:
    """Return status and body of a reply in which a `FakeCloud` streams `text`."""
    about = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = ({"delta": {"content": text}, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"})
    usage = {"prompt_tokens": 20, "completion_tokens": 30, "total_tokens": 50}
    chunks = [{**about, "choices": [{"index": 0, **choice}]} for choice in choices]
    chunks.append({**about, "choices": [], "usage": usage})
    return 200, b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


@contextmanager
def browser() -> Iterator[Any]:
    """Run Chromium under Playwright's control, and yield the browser."""
    driver = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: run `make test`")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


def expect(place: Any, message: str | None = None) -> Any:
    """Return Playwright's assertions about a locator. They retry for up to 30 seconds, because machines may be slow."""
    assertions = importlib.import_module("playwright.sync_api").expect
    assertions.set_options(timeout=30_000)
    return assertions(place, message)


@contextmanager
def page_daemon(cloud_url: str, folder: Path) -> Iterator[str]:
    """Run a daemon with the calibrated pocket model and a cloud, and yield its URL. Clients need the key `KEY`."""
    config = RouterConfig(
        local="pocket",
        cloud_url=cloud_url,
        cloud_model="pocket-large",
        ledger=folder / "ledger.sqlite3",
        experience=folder / "experience.sqlite3",
        prices=Prices(cloud_input=0.5, cloud_output=1.5),
    )
    with serving(daemon_app(Router(config), KEY), lifespan=True) as url:
        yield url
