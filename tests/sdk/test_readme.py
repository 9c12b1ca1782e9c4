"""The README's code runs as it stands there, in a process of its own that says nothing it was not asked to."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from homes import home_in
from router_fakes import CLOUD_TEXT, FakeCloud

README = Path(__file__).parents[2] / "README.md"
ASYNC = """
import asyncio
from updraft import AsyncOpenAI

async def main():
    client = AsyncOpenAI(local="model.gguf", cloud_url="http://127.0.0.1:8000", cloud_model="large")
    stream = await client.chat.completions.create(
        model="auto", messages=[{"role": "user", "content": "What is 17 + 25?"}], stream=True
    )
    async for chunk in stream:
        print((chunk.choices[0].delta.content or "") if chunk.choices else "", end="")

asyncio.run(main())
"""


def snippet() -> str:
    (code,) = re.findall(r"## In your code\n+```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


@pytest.mark.parametrize("code", [snippet(), ASYNC], ids=["readme", "async"])
def test_readme_example_runs_and_exits_quietly(code: str, cloud: FakeCloud, tmp_path: Path) -> None:
    """Nobody closes the client: the interpreter's exit does, and what was seen is kept all the same."""
    ours = {"http://127.0.0.1:8000": cloud.url, '"model.gguf"': '"pocket"', '"large"': '"pocket-large"'}
    script = code
    for shown, used in ours.items():
        assert shown in script
        script = script.replace(shown, used)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UPDRAFT_")}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script],
        env={**environ, "UPDRAFT_HOME": str(home_in(tmp_path)), "UPDRAFT_EXPERIENCE": "true"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "42" in done.stdout or CLOUD_TEXT in done.stdout
    for file, table in (("ledger", "requests"), ("experience", "observations")):
        with sqlite3.connect(tmp_path / "home" / f"{file}.sqlite3") as connection:
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        connection.close()
        assert rows == 1, file
        assert not (tmp_path / "home" / f"{file}.sqlite3-wal").exists(), f"the {file} was not closed"


FORK = """
import os, sys
from updraft import OpenAI

fresh, used = OpenAI(local="pocket", max_retries=0), OpenAI(local="pocket", max_retries=0)

def ask(client):
    try:
        client.chat.completions.create(model="local", messages=[{"role": "user", "content": "What is 2 + 3?"}])
        return "answered"
    except Exception as error:
        return str(error)

print(ask(used), flush=True)
child = os.fork()
if child == 0:
    print(ask(used), ask(fresh), sep=chr(10), flush=True)
    used.close()
    fresh.close()
    sys.exit()  # runs what every library has to do at the end
assert os.waitpid(child, 0)[1] == 0
print(ask(used))
"""


def test_a_fork_opens_a_router_of_its_own(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UPDRAFT_")}
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env={**environ, "UPDRAFT_HOME": str(home_in(tmp_path))},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.splitlines(), done.returncode) == (["answered"] * 4, 0)
