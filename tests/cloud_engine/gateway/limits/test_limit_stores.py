"""Limits in a mapped file and in a real Redis server: processes never pass them, and nothing leaks by kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import limit_worker
import msgspec
import pytest
from redis_server import expire_leases
from updraft.accounting.accounts import AccountUsage, Claim
from updraft.accounting.budget import TokenDemand
from updraft.cloud_engine.gateway.limits import redis_store, shared_memory
from updraft.cloud_engine.gateway.limits.store import LimitStore
from updraft.protocol.errors import OverloadedError
from updraft.protocol.safety.system import boot_time

WithStore = Callable[[Callable[[LimitStore], Coroutine[Any, Any, None]]], None]
LIMIT = 10_000.0


@pytest.fixture(params=["file", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "limits")
        return
    import redis

    url = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    yield url


@pytest.fixture
def with_store(where: str) -> WithStore:
    """Runs a test with a store of its own."""

    def run(work: Callable[[LimitStore], Coroutine[Any, Any, None]]) -> None:
        async def inside() -> None:
            store = limit_worker.open_store(where)
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(inside())

    return run


def start(where: str, requests: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, limit_worker.__file__, where, str(requests), str(LIMIT), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    worker.stdin.write("go\n")
    worker.stdin.flush()


def told(worker: subprocess.Popen[str]) -> dict[str, int]:
    assert worker.stdout is not None
    return json.loads(worker.stdout.readline())


async def begin(store: LimitStore) -> None:
    (budget,) = (claim for claim in limit_worker.claims(LIMIT, 1) if claim.is_budget)
    await store.seed(budget, 0.0)


def test_a_thousand_requests_in_four_processes_never_pass_a_limit(where: str, with_store: WithStore) -> None:
    """Their use is in the account to the token, less what drained since."""

    async def work(store: LimitStore) -> None:
        await begin(store)
        began = time.time()
        workers = [start(where, 250) for _ in range(4)]
        for worker in workers:
            tell(worker)
        answers = [told(worker) for worker in workers]
        for worker in workers:
            worker.communicate()
        used = sum(answer["used"] for answer in answers)
        admission = await store.admit(limit_worker.claims(LIMIT, 0))
        drained = LIMIT * (time.time() - began) / 60
        tokens, in_flight, usd = admission.usages
        assert used <= LIMIT + drained
        assert sum(answer["admitted"] for answer in answers) < 1000  # the limit was reached: they asked for 75,000
        assert used - drained - 2 <= tokens.used <= used
        assert usd.used == pytest.approx(used / 1000)
        assert (tokens.reserved, in_flight.reserved, usd.reserved) == (0, 0, 0)

    with_store(work)


def test_reservations_of_a_killed_worker_from_budgets_count_as_spent(where: str, with_store: WithStore) -> None:
    """The other reservations end, and the next worker, which takes the dead worker's place, changes nothing."""

    async def work(store: LimitStore) -> None:
        await begin(store)
        with start(where, 400, "--hold") as victim:
            tell(victim)
            assert told(victim)["admitted"] > 50
            (*_, held) = (await store.admit(limit_worker.claims(LIMIT, 0))).usages
            full = await store.admit(limit_worker.claims(LIMIT, 2000))
            assert full.refused is not None
            assert full.usages[-1].reserved > 8000
            victim.kill()
        if "://" in where:
            expire_leases(where)
        assert (await store.admit(limit_worker.claims(LIMIT, LIMIT - 10))).refused is None
        await limit_worker.open_store(where).close()
        (_, _, budget) = (await store.admit(limit_worker.claims(LIMIT, 0))).usages
        assert budget.used == pytest.approx(held.reserved) and held.reserved > 8

    with_store(work)


def test_a_new_worker_in_the_place_of_a_killed_one_books_its_reservations(tmp_path: Path) -> None:
    async def work() -> None:
        store = limit_worker.open_store(str(tmp_path / "limits"))
        await begin(store)
        with start(str(tmp_path / "limits"), 400, "--hold") as victim:
            tell(victim)
            assert told(victim)["admitted"] > 50
            victim.kill()
        await limit_worker.open_store(str(tmp_path / "limits")).close()
        (*_, budget) = (await store.admit(limit_worker.claims(LIMIT, 0))).usages
        assert budget.used > 8
        assert budget.reserved == 0
        await store.close()

    asyncio.run(work())


def test_a_worker_that_redis_took_for_dead_settles_to_the_actual_cost(redis_url: str) -> None:
    async def work() -> None:
        late, other = redis_store.RedisStore(redis_url), redis_store.RedisStore(redis_url)
        claim = Claim("key", "late", "usd_per_day", 10.0, 4.0, 1.0, 4e9)
        await late.seed(claim, 0.0)
        admission = await late.admit([claim])
        expire_leases(redis_url)
        probe = msgspec.structs.replace(claim, amount=0.0)
        assert (await other.admit([probe])).usages == [AccountUsage(4.0, 0.0)]
        await late.settle([(claim, 0.5, admission.receipt)])
        assert (await other.admit([probe])).usages == [AccountUsage(0.5, 0.0)]
        await late.close()
        await other.close()

    asyncio.run(work())


def test_all_or_nothing(with_store: WithStore) -> None:
    async def work(store: LimitStore) -> None:
        first, second = Claim("key", "a", "requests", 5, 1), Claim("model", "m", "requests", 1, 1)
        assert (await store.admit([first, second])).refused is None
        for _ in range(3):
            refused = await store.admit([first, second])
            assert refused.refused == second
            assert 0 < refused.usages[-1].wait_s(second, refused.now) <= 60
        (left,) = (await store.admit([first])).usages
        assert left.used == pytest.approx(1, abs=0.5)

    with_store(work)


def test_a_budget_begins_with_what_the_ledger_says(with_store: WithStore) -> None:
    async def work(store: LimitStore) -> None:
        begins = time.time() // 86_400 * 86_400
        budget = Claim("key", "a", "usd_per_day", 10.0, 4.0, begins, begins + 86_400)
        assert (await store.admit([budget])).unknown == budget
        await store.seed(budget, 5.0)
        await store.seed(budget, 0.0)  # somebody has
        admission = await store.admit([budget])
        assert admission.refused is None
        assert (await store.admit([budget])).refused == budget
        await store.settle([(budget, 0.5, admission.receipt)])
        assert (await store.admit([budget])).usages[0].used == 5.5

    with_store(work)


def test_an_answer_is_granted_its_maximum_or_a_share_of_what_is_left(with_store: WithStore) -> None:
    """In the same step as the rest of its claims; a settlement gives all of the grant back."""

    async def work(store: LimitStore) -> None:
        budget = Claim("key", "a", "usd_per_day", 100.0, 1.0, 1.0, 4e9, per_token=1.0)
        rate = Claim("key", "a", "tokens", 1e6, 1.0)
        await store.seed(budget, 0.0)
        admissions = [await store.admit([rate, budget], TokenDemand(1, most)) for most in (90, 90, 2)]
        assert [each.tokens for each in admissions] == [90, 2, 2], "alone, a quarter of 10, and no quarter of 8"
        assert (await store.admit([rate, budget], TokenDemand(1, 1))).usages[1].reserved == 94
        await store.settle([(claim, 3.0, each.receipt) for each in admissions for claim in each.claims])
        (_, usage) = (await store.admit([rate, budget])).usages
        assert (usage.used, usage.reserved) == (9.0, 1)

    with_store(work)


def test_requests_in_flight(with_store: WithStore) -> None:
    async def work(store: LimitStore) -> None:
        claim = Claim("tenant", "t", "concurrent", 2, 1)
        admissions = [await store.admit([claim]) for _ in range(3)]
        assert [each.refused for each in admissions] == [None, None, claim]
        await store.settle([(claim, 0, admissions[0].receipt)])
        assert [(await store.admit([claim])).refused for _ in range(2)] == [None, claim]

    with_store(work)


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_a_step_of_the_wall_clock_neither_frees_nor_freezes_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """A budget goes on too: its period is named by the calendar, and its account does not expire by the step."""

    async def work() -> None:
        store = limit_worker.open_store(str(tmp_path / "limits"))
        rate, begins = Claim("key", "a", "requests", 2, 1), time.time() // 86_400 * 86_400
        budget = Claim("key", "a", "usd_per_day", 10.0, 0.0, begins, begins + 86_400)
        await store.seed(budget, 5.0)
        assert [(await store.admit([rate])).refused for _ in range(3)] == [None, None, rate]
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + step_s)
        refused = await store.admit([rate])
        assert refused.refused == rate
        assert 0 < refused.usages[-1].wait_s(rate, refused.now) <= 60
        assert (await store.admit([budget])).usages[0].used == 5.0
        ahead = boot_time() + 61
        monkeypatch.setattr(shared_memory, "boot_time", lambda: ahead)
        assert [(await store.admit([rate])).refused for _ in range(3)] == [None, None, rate]
        await store.close()

    asyncio.run(work())


def test_nothing_outlives_a_boot(tmp_path: Path) -> None:
    """A later boot's clock begins anew: what the file holds would be far ahead of it."""

    async def work() -> None:
        claim = Claim("key", "a", "requests", 1, 1)
        for _ in range(2):
            store = limit_worker.open_store(str(tmp_path / "limits"))
            assert (await store.admit([claim])).refused is None
            await store.close()

    asyncio.run(work())


def test_failed_settlements_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was stopped while it held the memory."""
    monkeypatch.setattr(shared_memory, "_LOCK_S", 0.05)

    async def work() -> None:
        store, claim = limit_worker.open_store(str(tmp_path / "limits")), Claim("key", "k", "concurrent", 1, 1)
        assert (await store.admit([claim])).refused is None
        with (tmp_path / "limits").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            await store.settle([(claim, 0, "")])
            with pytest.raises(OverloadedError):
                await store.admit([claim])
        assert (await store.admit([claim])).refused is None
        await store.close()

    asyncio.run(work())


@pytest.mark.parametrize("failure", [OverloadedError("The answer got lost."), asyncio.CancelledError()])
def test_a_lost_answer_of_redis_counts_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """The server acts, and its answer never comes, or its client has left: of a settlement, then of an admission."""
    monkeypatch.setattr(redis_store, "_RENEWED_S", 0.01)

    async def work() -> None:
        store, claim = (
            redis_store.RedisStore(redis_url),
            Claim("key", repr(failure), "usd_per_day", 10.0, 4.0, 1.0, 4e9),
        )
        await store.seed(claim, 0.0)
        admission = await store.admit([claim])
        run, lost = store._run, {"settle", "admit"}  # pyright: ignore[reportPrivateUsage]

        async def run_unheard(action: str, *more: Any) -> list[Any]:
            answer = await run(action, *more)
            if action in lost:
                lost.remove(action)
                raise failure
            return answer

        monkeypatch.setattr(store, "_run", run_unheard)
        with contextlib.suppress(asyncio.CancelledError):
            await store.settle([(claim, 0.5, admission.receipt)])
        with pytest.raises(type(failure)):
            await store.admit([claim])
        async with asyncio.timeout(30):
            while store._unsettled:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(0.01)
        (usage,) = (await store.admit([claim])).usages
        assert (usage.used, usage.reserved) == (0.5, 0)
        await store.close()

    asyncio.run(work())


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    store = limit_worker.open_store(str(tmp_path / "limits"))
    assert (tmp_path / "limits").stat().st_mode & 0o077 == 0
    for file in (tmp_path / "limits.workers").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    asyncio.run(store.close())


def test_a_disk_that_gets_full_ends_no_process(tmp_path: Path) -> None:
    """Disk space is reserved before pages are mapped: limits keep working. See tests/security/test_mapped_files.py."""
    code = (
        "import asyncio, resource, sys\n"
        "from limit_worker import claims, open_store\n"
        "async def work():\n"
        "    store = open_store(sys.argv[1])\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "    admission = await store.admit([each for each in claims(10.0, 1) if not each.is_budget])\n"
        "    print(admission.refused)\n"
        "asyncio.run(work())\n"
    )
    path = os.pathsep.join([str(Path(limit_worker.__file__).parent), *sys.path])
    command, environment = [sys.executable, "-c", code, str(tmp_path / "limits")], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200)
    assert done.stdout == "None\n"
