"""One gateway before one node, both real processes, which the tests of this folder attack."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from raw_http import exchanged, post
from server_processes import FAKE_NODE, running

CHAT = "/v1/chat/completions"


@dataclass
class Gateway:
    url: str
    node_url: str
    # Keys with the scopes inference, and admin and usage.
    key: str
    admin_key: str
    keys_file: Path
    usage_file: Path
    log_file: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"}

    def chat(self, key: str | None = None) -> int:
        """The status of an ordinary request."""
        body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.post(self.url + CHAT, json=body, headers=headers, timeout=60).status_code

    def sent(self, body: bytes, *headers: str, host: str = "localhost") -> bytes:
        """The whole answer to a chat request of these bytes, with the key."""
        return exchanged(self.url, post(CHAT, body, f"authorization: Bearer {self.key}", *headers, host=host))

    def rows(self) -> int:
        httpx.get(f"{self.url}/admin/usage", headers=self.admin, timeout=60).raise_for_status()
        with closing(sqlite3.connect(self.usage_file)) as connection:
            return connection.execute("SELECT COUNT(*) FROM usage").fetchone()[0]


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys, usage, log = folder / "keys.sqlite3", folder / "usage.sqlite3", folder / "log"
    key, admin_key = make_key(keys, "tester"), make_key(keys, "operator", "admin", "usage", "node")
    command = ["-m", "updraft", "gateway", "--port", "0", "--keys", str(keys), "--ledger", str(usage)]
    with (
        running(str(FAKE_NODE)) as node,
        running(*command, "--node", node.url, "--exit-with-parent", log=log, umask=0) as process,
    ):
        yield Gateway(process.url, node.url, key, admin_key, keys, usage, log)


@dataclass
class Node:
    url: str
    key: str
    # The log file of the process, and the folder of its sockets.
    log_file: Path
    folder: Path
    # A file that exists once somebody has run code that came along with the model.
    canary: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=60)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A real node with a key, whose model comes with code of a stranger's."""
    with _running_node(tmp_path_factory.mktemp("node")) as running_node:
        yield running_node


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[Node]:
    """Another one, that a test may stop."""
    with _running_node(tmp_path) as running_node:
        yield running_node


@contextmanager
def _running_node(folder: Path) -> Iterator[Node]:
    from tiny_model import write_model

    key = "canary-node-key"
    model, canary = write_model(folder / "tiny", 0), folder / "canary"
    code = f"open({str(canary)!r}, 'w').close()\n"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "sitecustomize", "conftest", "json"):
        (model / f"{name}.py").write_text(code)
    classes = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    classes["AutoTokenizer"] = ["tokenization_evil.Evil", None]
    for name in ("config.json", "tokenizer_config.json"):
        file = model / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**fields, "auto_map": classes, "trust_remote_code": True}))
    command = ("-m", "updraft", "node", "--port", "0", "--model", str(model), "--threads", "1", "--exit-with-parent")
    # The paths of sockets must be short, and a core that outlives its node for a moment removes its own.
    with tempfile.TemporaryDirectory(prefix="sockets-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        variables = {"UPDRAFT_NODE_API_KEY": key, "TMPDIR": sockets}
        with running(*command, log=folder / "log", umask=0, **variables) as process:
            yield Node(process.url, key, folder / "log", Path(sockets), canary)
