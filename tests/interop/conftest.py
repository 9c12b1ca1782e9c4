"""The places to try foreign clients: a scripted cloud behind the SDK's transport, the daemon and the gateway."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from interop_cloud import MODEL, scripted_cloud
from server_processes import running

KEY = "sk-interop-0123456789"
PYTHONS = (sys.executable, str(Path(__file__).parents[2] / ".venv" / "bin" / "python"))


@dataclass(frozen=True)
class Place:
    """The place that a client's requests go to."""

    name: str
    # Ends in /v1.
    url: str
    model: str
    key: str = KEY
    # `httpx` clients for libraries that take them: {} where the URL is a real one.
    clients: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def cloud_url() -> Iterator[str]:
    with scripted_cloud() as url:
        yield f"{url}/v1"


@pytest.fixture(scope="session")
def daemon(cloud_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, with /v1."""
    home = tmp_path_factory.mktemp("home")
    command = ["-m", "updraft", "serve", "--cloud-url", cloud_url, "--cloud-model", MODEL, "--port", "0"]
    with running(*command, UPDRAFT_HOME=str(home)) as process:
        yield f"{process.url}/v1"


@pytest.fixture(scope="session")
def gateway(cloud_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Its URL, with /v1, and a key for it."""
    from gateway_keys import make_key

    folder = tmp_path_factory.mktemp("gateway")
    key = make_key(folder / "keys", "interop")
    command = ["-m", "updraft", "gateway", "--node", cloud_url.removesuffix("/v1"), "--keys", str(folder / "keys")]
    with running(*command, "--ledger", str(folder / "usage.sqlite3"), "--port", "0") as process:
        yield f"{process.url}/v1", key


def _has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def node() -> Iterator[str]:
    """The URL of a node, with /v1. It wants torch: of this environment, or of `make install`."""
    completion = [each for each in PYTHONS if Path(each).exists() and _has_torch(each)]
    if not completion:
        pytest.skip("a node needs torch: make install")
    command = ["-m", "updraft", "node", "--model", "pocket", "--threads", "1", "--port", "0"]
    with running(*command, "--exit-with-parent", python=completion[0]) as process:
        yield f"{process.url}/v1"


@pytest.fixture(scope="session", params=["transport", "daemon", "gateway"])
def place(request: pytest.FixtureRequest, cloud_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param == "daemon":
        yield Place("daemon", request.getfixturevalue("daemon"), "auto")
        return
    if request.param == "gateway":
        url, key = request.getfixturevalue("gateway")
        yield Place("gateway", url, MODEL, key)
        return
    import updraft
    from updraft.router.config import RouterConfig
    from updraft.sdk.transport import httpx_of_openai

    httpx = httpx_of_openai()
    config = RouterConfig(
        cloud_url=cloud_url, cloud_model=MODEL, ledger=tmp_path_factory.mktemp("transport") / "ledger.sqlite3"
    )
    with httpx.Client(transport=updraft.transport(config)) as client:
        clients = {"sync": client, "async": httpx.AsyncClient(transport=updraft.async_transport(config))}
        yield Place("transport", "http://updraft.invalid/v1", "auto", clients=clients)
