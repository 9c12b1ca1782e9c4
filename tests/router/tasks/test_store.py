"""The evidence file: order, grades, kills, other processes and foreign files."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.online.experience import ExperienceStore
from updraft.protocol.errors import ConfigurationError, InvalidRequestError, NotFoundError
from updraft.router.tasks import store as stores
from updraft.router.tasks.identity import TaskShape
from updraft.router.tasks.report import stored_reports
from updraft.router.tasks.store import Grade, TaskStore

SHAPE, OTHER = TaskShape("letters", "a"), TaskShape("", "b")
FEATURES = np.arange(12, dtype=np.float32).tobytes()


@pytest.fixture
def store(tmp_path: Path):
    with closing(TaskStore(tmp_path / "tasks.sqlite3")) as opened:
        yield opened


def sampled(store: TaskStore, count: int, local: float | None = 1.0, shape: TaskShape = SHAPE) -> str:
    """Store graded rows of a task, and return its id."""
    task = store.id_of(shape)
    store.add_task(task, shape, keep_text=False)
    for at in range(count):
        store.begin(task, "pair", f"{task}-{at}")
        store.grade(f"{task}-{at}", Grade(local, None if local is None else 1.0, "agreement", features=FEATURES))
    return task


def test_rows_are_read_in_order_up_to_one_that_waits(store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    task = sampled(store, 2)
    store.begin(task, "pair", "waits")
    store.begin(task, "pair", "later")
    store.grade("later", Grade(0.5, 1.0, "fields", "", FEATURES))
    assert [each.request for each in store.samples(task, "pair")] == [f"{task}-0", f"{task}-1"]
    monkeypatch.setattr(stores, "GRADED_WITHIN_S", 0.0)
    *_, waits, later = store.samples(task, "pair", after=1)
    assert (waits.request, waits.row.local, waits.row.cloud, waits.row.request.is_faulty) == ("waits", 0.0, 1.0, True)
    assert (later.row.local, later.row.request.is_faulty) == (0.5, False)
    assert store.samples(task, "another pair") == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from /proc")
def test_a_row_of_a_killed_process_does_not_wait(store: TaskStore) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from updraft.router.tasks.store import TaskStore
        TaskStore(Path(sys.argv[1])).begin(sys.argv[2], "pair", "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    task = sampled(store, 1)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(store.path), task], check=False)
    store.begin(task, "pair", "later")
    store.grade("later", Grade(1.0, 1.0, "agreement", features=FEATURES))
    assert [each.request for each in store.samples(task, "pair")] == [f"{task}-0", "killed", "later"]
    store.begin(task, "pair", "own")
    assert store.samples(task, "pair")[-1].request == "later", "a row of this process waits"


def test_a_file_of_the_former_format_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "tasks.sqlite3"
    with closing(TaskStore(path)) as store:
        task = sampled(store, 2)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE samples DROP COLUMN owner")
        connection.execute("PRAGMA user_version=1")
        connection.commit()
    with closing(TaskStore(path)) as store:
        assert len(store.samples(task, "pair")) == 2
        assert sampled(store, 3) == task
        assert len(store.samples(task, "pair")) == 3


def test_a_grade_is_final_except_for_the_users(store: TaskStore) -> None:
    task = sampled(store, 1)
    store.grade(f"{task}-0", Grade(0.0, 1.0, "fields"))
    store.drop([f"{task}-0"])
    (sample,) = store.samples(task, "pair")
    assert (sample.local, sample.grader) == (1.0, "agreement")
    assert store.correct(f"{task}-0", 0.25, 1.0) == task
    (sample,) = store.samples(task, "pair")
    assert (sample.local, sample.grader) == (0.25, "you")
    assert store.task("letters").changes == 1
    with pytest.raises(NotFoundError, match="was not sampled"):
        store.correct("unknown", 1, 1)
    with pytest.raises(InvalidRequestError, match="from 0"):
        store.correct(f"{task}-0", 2, 1)


def test_tasks_are_found_by_id_prefix_and_name(store: TaskStore) -> None:
    task, other = sampled(store, 1), sampled(store, 1, shape=OTHER)
    assert store.task(task) == store.task(task[:6]) == store.task("letters")
    store.rename(other, "letters")
    with pytest.raises(InvalidRequestError, match="printable"):
        store.rename(other, "a\x1b[31m")
    with pytest.raises(InvalidRequestError, match="names 2 tasks"):
        store.task("letters")
    with pytest.raises(NotFoundError, match="no task"):
        store.task("unknown")
    with pytest.raises(InvalidRequestError, match="same task"):
        store.join(task, task)


def test_merged_tasks_share_their_rows(store: TaskStore) -> None:
    task, other = sampled(store, 3), sampled(store, 2, 0.0, OTHER)
    third = sampled(store, 1, shape=TaskShape("third", "c"))
    store.join(third, other)
    store.join(other, task)
    assert [sample.local for sample in store.samples(task, "pair")] == [1, 1, 1, 0, 0, 1]
    assert {each.id: each.joined for each in store.tasks()} == {task: "", other: task, third: task}
    assert store.task(third) == store.task(other) == store.task(task)


def test_late_grades_are_refused(store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    task = sampled(store, 1)
    store.begin(task, "pair", "late")
    monkeypatch.setattr(stores, "GRADED_WITHIN_S", 0.0)
    assert [sample.request for sample in store.samples(task, "pair")] == [f"{task}-0", "late"]
    store.grade("late", Grade(1.0, 1.0, "agreement"))
    *_, late = store.samples(task, "pair")
    assert (late.local, late.row.local) == (None, 0.0)


def test_the_newest_rows_are_kept(store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_MAX_ROWS", 5)
    task, other = sampled(store, 12), sampled(store, 3, shape=OTHER)
    assert [sample.request for sample in store.samples(task, "pair")] == [f"{task}-{at}" for at in range(7, 12)]
    assert len(store.samples(other, "pair")) == 3


def test_reports_say_what_is_missing(store: TaskStore) -> None:
    perfect, bad, ungraded = sampled(store, 60), sampled(store, 30, 0.0, OTHER), TaskShape("free", "f")
    sampled(store, 5, None, ungraded)
    found = {report.task: report for report in stored_reports(store, 0.9, {})}
    assert (found[perfect].tier, found[perfect].missing) == ("device", 0)
    assert (found[bad].tier, found[bad].missing, found[bad].local_score) == ("cloud", None, 0.0)
    assert (found[store.id_of(ungraded)].graded, found[store.id_of(ungraded)].missing) == (0, None)
    (few,) = [report for report in stored_reports(store, 0.98, {}) if report.task == perfect]
    assert few.tier == "cloud" and few.missing is not None and 80 < few.missing < 300


def test_two_files_have_different_ids(store: TaskStore, tmp_path: Path) -> None:
    with closing(TaskStore(tmp_path / "other.sqlite3")) as other:
        assert other.id_of(SHAPE) != store.id_of(SHAPE)
    with closing(TaskStore(store.path)) as again:
        assert again.id_of(SHAPE) == store.id_of(SHAPE)


def test_another_process_is_noticed(store: TaskStore) -> None:
    before = store.version
    sampled(store, 1)
    assert store.version == before
    with closing(TaskStore(store.path)) as other:
        other.set_pin(store.id_of(SHAPE), "cloud")
    assert store.version != before


@pytest.mark.parametrize("content", [b"no database at all, but longer than a hundred bytes " * 4, None])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.sqlite3"
    if content is None:
        ExperienceStore(path).close()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"file\.sqlite3"):
        TaskStore(path)


KILLED = """
    import sys
    from pathlib import Path
    from updraft.router.tasks.identity import TaskShape
    from updraft.router.tasks.store import Grade, TaskStore

    store, shape = TaskStore(Path(sys.argv[1])), TaskShape("letters", "a")
    task = store.id_of(shape)
    store.add_task(task, shape, keep_text=False)
    for at in range(10**6):
        store.begin(task, "pair", f"{sys.argv[2]}-{at}")
        store.grade(f"{sys.argv[2]}-{at}", Grade(1.0, 1.0, "agreement"))
        print(at, flush=True)
"""


def test_kills_lose_no_grade(store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "GRADED_WITHIN_S", 0.0)  # a killed process leaves a row that waits for its grade
    told: dict[str, int] = {}
    for name in ("one", "two", "three"):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(store.path), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(20)]
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.read().splitlines()
        told[name] = int(lines[-1])
    requests = {sample.request for sample in store.samples(store.id_of(SHAPE), "pair")}
    assert requests >= {f"{name}-{at}" for name, last in told.items() for at in range(last)}


@given(grades=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_rows_return_as_they_were(tmp_path_factory: pytest.TempPathFactory, grades: list[tuple[float, float]]) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.sqlite3"
    with closing(TaskStore(path)) as store:
        for at, (local, cloud) in enumerate(grades):
            store.begin("task", "pair", str(at))
            store.grade(str(at), Grade(local, cloud, "fields", "", FEATURES))
        rows = [sample.row for sample in store.samples("task", "pair")]
    assert [(row.local, row.cloud) for row in rows] == grades
    assert all(row.request.features is not None and row.request.features.tobytes() == FEATURES for row in rows)
