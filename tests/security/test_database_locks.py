"""No database file is opened outside SQLite, whose locks of the process would vanish when the file is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from router_fakes import running_cloud

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX locks")
PROGRAM = """
import os, sys
home = os.environ["UPDRAFT_HOME"]
opened = []

def watch(event, arguments):
    if event in ("open", "os.open") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(arguments[0])
        if ".sqlite3" in os.path.basename(name):
            opened.append(name)

sys.addaudithook(watch)
import time, updraft
from updraft.router.accounting.ledger import Ledger
from updraft.router.settings_sources import load_config

config = load_config()
with updraft.OpenAI(config=config, max_retries=0) as client:
    for _ in range(2):
        answer = client.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hi"}])
        client.updraft.why(answer.model_extra["updraft"]["request_id"])
    with updraft.OpenAI(config=config, max_retries=0, cloud_model="other") as second:
        second.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hi"}])
    file = client.files.create(file=("a.txt", b"text"), purpose="user_data")
    client.files.delete(file.id)
    Ledger(config.ledger).close()
    print(opened)
"""


def test_no_database_is_opened_outside_sqlite(tmp_path: Path) -> None:
    with running_cloud() as cloud:
        settings = {"UPDRAFT_CLOUD_URL": cloud.url, "UPDRAFT_CLOUD_MODEL": "big", "UPDRAFT_EXPERIENCE": "features"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **settings, "UPDRAFT_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.stdout.splitlines(), done.returncode) == (["[]"], 0), done.stderr
