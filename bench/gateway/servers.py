"""Servers that `updraft bench gateway` drives: a stub node, and gateways in front of it on a separate core."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...cloud_engine.gateway.access.database import KeyDatabase, NewKey
from ...cloud_engine.gateway.access.principal import Limits
from ...protocol.safety.system import python_command

_READY_S = 180.0
_LIMITS = Limits(requests_per_minute=10**9, tokens_per_minute=10**12, max_concurrency=10**6, usd_per_day=1e9)
_PRICES = '[[prices]]\nmodel = "stub"\ninput = 1\noutput = 1\n'
_NGINX = """
worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream node {{ server {node}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://node; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
_LITELLM = """
model_list:
  - model_name: stub
    litellm_params: {{model: openai/stub, api_base: "{node}/v1", api_key: none}}
general_settings: {{master_key: sk-bench}}
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server that the load generator can drive."""

    name: str
    url: str
    key: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the processor seconds used so far by the process and its children."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(cpu.user + cpu.system for cpu in times)

    def memory_mb(self) -> float:
        return sum(process.memory_info().rss for process in self._processes()) / 1e6

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def stub(core: int, *options: str) -> Generator[Server]:
    command = python_command("-m", "updraft.bench.gateway.stub", *options)
    with _started("stub", command, core) as process:
        yield Server("direct", _announced_url(process), "", psutil.Process(process.pid))


@contextmanager
def updraft(node: str, core: int, folder: Path, *options: str) -> Generator[Server]:
    """Start our gateway with a key that has a limit of every kind, each too high to be reached."""
    keys, prices = folder / "keys.sqlite3", folder / "prices.toml"
    _, key = KeyDatabase(keys).create(NewKey("bench", limits=_LIMITS), "bench")
    prices.write_text(_PRICES)
    command = python_command("-m", "updraft", "gateway", "--port", "0", "--node", node, "--exit-with-parent")
    command += ["--keys", str(keys), "--ledger", str(folder / "usage.sqlite3"), "--prices", str(prices), *options]
    with _started("updraft", command, core) as process:
        yield Server("updraft", _announced_url(process), key, psutil.Process(process.pid))


@contextmanager
def nginx(node: str, core: int, folder: Path) -> Generator[Server]:
    """Start nginx as a plain reverse proxy, without keys or meters. Raises FileNotFoundError if it is missing."""
    if (program := shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")) is None:
        raise FileNotFoundError("nginx")
    port, config = free_port(), folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, node=node.removeprefix("http://"), port=port))
    with _started("nginx", [program, "-p", str(folder), "-c", str(config)], core) as process:
        yield _ready(Server("nginx", f"http://127.0.0.1:{port}", "", psutil.Process(process.pid)), "/health")


@contextmanager
def litellm(python: Path, node: str, core: int, folder: Path) -> Generator[Server]:
    """Start LiteLLM's proxy with a master key but without a database, and so without the work for budgets."""
    port, config = free_port(), folder / "litellm.yaml"
    config.write_text(_LITELLM.format(node=node))
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with _started("litellm", command, core) as process:
        server = Server("litellm", f"http://127.0.0.1:{port}", "sk-bench", psutil.Process(process.pid))
        yield _ready(server, "/health/liveliness")


@contextmanager
def _started(name: str, command: Sequence[str], core: int) -> Generator[subprocess.Popen[bytes]]:
    quiet, own = subprocess.DEVNULL, psutil.Process()
    cores = own.cpu_affinity()
    own.cpu_affinity([core])  # inherited by the child process
    try:
        process = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    finally:
        own.cpu_affinity(cores)
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"{name} did not exit after SIGTERM.") from None


def _announced_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    if not line.startswith("ready "):
        raise RuntimeError(f"{process.args} did not start.")
    return line.split()[1]


def _ready(server: Server, path: str) -> Server:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.process.is_running():
        try:
            with urllib.request.urlopen(server.url + path, timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{server.name} was not ready within {_READY_S:.0f} s.")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
