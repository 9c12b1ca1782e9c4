"""Clients for Node.js against the daemon and the gateway. `make interop` installs them into out/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Place
from interop_cloud import TEXT

SCRIPTS = Path(__file__).parent / "javascript"
INSTALLED = Path(os.environ.get("INTEROP_JAVASCRIPT", "out/interop/javascript"))


@pytest.mark.parametrize("script", ["openai.mjs", "ai-sdk.mjs"])
def test_a_client_for_node(script: str, place: Place) -> None:
    if place.clients:
        pytest.skip("an HTTP transport of Python serves no other process")
    if shutil.which("node") is None or not (INSTALLED / "node_modules").is_dir():
        pytest.skip("node or its packages are not installed: make interop")
    shutil.copy(SCRIPTS / script, INSTALLED / script)
    about = {"BASE_URL": place.url, "API_KEY": place.key, "MODEL": place.model}
    done = subprocess.run(
        ["node", script],
        cwd=INSTALLED,
        env={**os.environ, **about},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"reply": TEXT, "streamed": TEXT, "called": ["Oslo"], "final": TEXT}
