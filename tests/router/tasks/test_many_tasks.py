"""Ten thousand tasks: their memory, and the time of a decision."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
    import asyncio, json, sys, time
    from pathlib import Path
    from updraft.router.tasks.book import TaskBook
    from updraft.router.tasks.identity import TaskShape
    from updraft.router.tasks.rules import LearningRules
    from updraft.router.tasks.store import TaskStore

    store, features = TaskStore(Path(sys.argv[1])), bytes(48)
    ids = [store.id_of(TaskShape("", f"name\\0\\0task {at}")) for at in range(10_000)]
    with store._database.transaction() as connection:
        insert = "INSERT INTO samples VALUES (NULL, ?, 'pair', ?, 0, 1, 1, 'agreement', '', ?, '')"
        connection.executemany("INSERT INTO tasks VALUES (?, '', '', 'auto', '', 0, 0)", [(each,) for each in ids])
        connection.executemany(insert, [(each, f"{each}-{n}", features) for each in ids for n in range(2)])

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    async def main():
        book = TaskBook(store, LearningRules("pair"))
        before = resident()
        await book.refresh()
        grown = resident() - before
        body = {"messages": [{"role": "system", "content": "You are helpful. " * 200}]}
        times = []
        for at in range(5_000):
            asked = {**body, "metadata": {"task": f"task {at}"}} if at % 2 else body
            began = time.thread_time()
            book.turn(book.shapes.of(asked, "auto"), at.to_bytes(16))
            times.append(time.thread_time() - began)
        print(json.dumps({"grown": grown, "p99": sorted(times)[-50]}))
        book.close()

    asyncio.run(main())
"""


def test_memory_and_decisions_stay_small(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "tasks.sqlite3")]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(told)
    assert told["grown"] < 50e6
    assert told["p99"] < 1e-3
