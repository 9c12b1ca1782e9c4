"""Messages over a socket of the engine are never unpickled, and nobody else can reach these sockets."""

from __future__ import annotations

import os
import pickle
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

zmq = pytest.importorskip("zmq")


class Bomb:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._file),)


def test_a_pickle_does_not_go_off(own_node: Any) -> None:
    assert own_node.complete().status_code == 200
    (folder,) = own_node.folder.glob("updraft-core-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for socket_file in list(folder.iterdir()):
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 1000
            socket.connect(f"ipc://{socket_file}")
            socket.send(pickle.dumps(Bomb(own_node.canary)))
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not own_node.canary.exists():
        time.sleep(0.1)
    assert not own_node.canary.exists()
    assert httpx.get(f"{own_node.url}/health").status_code in (200, 503), "whoever can write there may stop it, no more"
