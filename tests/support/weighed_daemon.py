"""A daemon in its own process, whose memory use can be measured after a garbage collection."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil

# For each health check, the daemon first collects garbage and returns freed memory to the system, so that the remaining
# memory is in use.
_CODE = """
import ctypes, gc, sys
from updraft.router.config import RouterConfig
from updraft.router.server.app import DaemonOptions, run_daemon
from updraft.router.server.endpoints import Endpoints

handle = Endpoints.handle
async def weighed(self, request):
    if request.path == "/health":
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
    return await handle(self, request)
Endpoints.handle = weighed
settings = dict(cloud_url=sys.argv[1], local=sys.argv[2] if sys.argv[2] != "none" else None, cloud_connect_timeout_s=60)
run_daemon(DaemonOptions(RouterConfig(**settings, cloud_model="big", confidence=0.6), port=0))
"""


@dataclass
class WeighedDaemon:
    url: str
    pid: int

    def weight(self) -> int:
        """Return the daemon's resident memory in bytes, after a garbage collection."""
        assert httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        return psutil.Process(self.pid).memory_info().rss


@contextmanager
def weighed_daemon(cloud_url: str, local: str = "none") -> Iterator[WeighedDaemon]:
    command = [sys.executable, "-c", _CODE, cloud_url, local]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield WeighedDaemon(process.stdout.readline().split()[1], process.pid)
        finally:
            process.kill()
