"""Several models at once: the bookkeeping against a simple model of it, races with threads, and real files."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from updraft.local_engine.pool import ModelPool
from updraft.protocol.errors import EngineError, ModelLoadError, ModelTooLargeError, OverloadedError
from waiting import wait_for

NEEDS = {"a": 10, "b": 12, "c": 16, "d": 22, "huge": 200}
TOTAL = 40


@dataclass
class FakeModel:
    """`mapped`: the part that the system goes on to count as free."""

    machine: FakeMachine
    name: str
    closed: bool = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        time.sleep(self.machine.close_s)
        self.machine.there.remove(self)


@dataclass
class FakeMachine:
    """Memory of `TOTAL` bytes, of which a model allocates half of its need and maps the rest."""

    there: list[FakeModel] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    now: float = 0.0
    delay_s: float = 0.0
    close_s: float = 0.0
    broken: bool = False

    def room(self) -> int:
        return TOTAL - self.allocated()

    def allocated(self) -> int:
        return sum(NEEDS[model.name] // 2 for model in self.there)

    def find(self, name: str) -> FakeCandidate:
        if name not in NEEDS:
            raise ModelLoadError(f"no {name}")
        return FakeCandidate(self, name)

    def pool(self, **options) -> ModelPool[FakeModel]:
        return ModelPool(self.find, self, **options)


@dataclass
class FakeCandidate:
    machine: FakeMachine
    name: str

    @property
    def need(self) -> int:
        return NEEDS[self.name]

    def check(self, room: int) -> None:
        if self.need > room:
            raise ModelTooLargeError(f"needs {self.need}, has {room}")

    def load(self) -> FakeModel:
        self.machine.loads.append(self.name)
        time.sleep(self.machine.delay_s)
        if self.machine.broken:
            raise ModelLoadError("broken")
        model = FakeModel(self.machine, self.name)
        self.machine.there.append(model)
        return model


class PoolMachine(RuleBasedStateMachine):
    """Beside the pool: who uses what, and what is idle since when. The least recently used is at the front."""

    @initialize()
    def start(self) -> None:
        self.machine = FakeMachine()
        self.pool = self.machine.pool(keep_alive_s=100.0, clock=lambda: self.machine.now)
        self.pool._keeper = threading.current_thread()  # no thread of its own: time is ours here
        self.users: list[tuple[str, object, FakeModel]] = []
        self.idle: dict[str, float] = {}

    def busy(self) -> set[str]:
        return {name for name, _, _ in self.users}

    @rule(name=st.sampled_from(sorted(NEEDS)), broken=st.sampled_from([False] * 7 + [True]))
    def take(self, name: str, broken: bool) -> None:
        self.machine.now += 1
        self.machine.broken = broken
        busy_need = sum(NEEDS[other] for other in self.busy())
        known = name in self.busy() | set(self.idle)
        context = self.pool.use(name)
        if not known and NEEDS[name] + busy_need > TOTAL:
            before = len(self.machine.there)
            with pytest.raises(OverloadedError if self.busy() else ModelTooLargeError):
                context.__enter__()
            assert len(self.machine.there) == before  # nothing was unloaded in vain
            return
        if not known:
            for other in list(self.idle):  # the least recently used go first, and no more than needed
                if NEEDS[name] + busy_need + sum(NEEDS[other] for other in self.idle) <= TOTAL:
                    break
                del self.idle[other]
        if not known and broken:
            with pytest.raises(ModelLoadError, match="broken"):
                context.__enter__()
            return
        model = context.__enter__()
        assert model.name == name
        self.idle.pop(name, None)
        self.users.append((name, context, model))

    @rule(names=st.lists(st.sampled_from("abcd"), min_size=3, max_size=6))
    def visit(self, names: list[str]) -> None:
        """Short uses one after the other: what fills the pool with idle models."""
        for name in names:
            count = len(self.users)
            self.take(name, broken=False)
            if len(self.users) > count:
                self.leave(count)
            self.agrees()

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.leave(data.draw(st.integers(0, len(self.users) - 1)))

    def leave(self, index: int) -> None:
        self.machine.now += 1
        name, context, _ = self.users.pop(index)
        context.__exit__(None, None, None)
        if name not in self.busy():
            self.idle[name] = self.machine.now

    @rule(seconds=st.sampled_from([1, 10, 60, 100]))
    def wait(self, seconds: int) -> None:
        self.machine.now += seconds
        following = self.pool.expire()
        self.idle = {name: since for name, since in self.idle.items() if self.machine.now - since < 100}
        left = [since + 100 - self.machine.now for since in self.idle.values()]
        assert following == min(left, default=None)

    @rule(name=st.sampled_from(sorted(NEEDS)))
    def unload(self, name: str) -> None:
        if name in self.busy():
            with pytest.raises(OverloadedError):
                self.pool.unload(name)
        else:
            assert self.pool.unload(name) == (self.idle.pop(name, None) is not None)

    @invariant()
    def agrees(self) -> None:
        held = self.pool.held()
        assert {found.name: found.users for found in held} == {
            **dict.fromkeys(self.idle, 0),
            **{name: [other for other, _, _ in self.users].count(name) for name in self.busy()},
        }
        assert [found.name for found in held if not found.users] == list(self.idle)
        assert all(not model.closed for _, _, model in self.users)
        assert sorted(model.name for model in self.machine.there) == sorted(found.name for found in held)
        assert sum(found.need for found in held) <= TOTAL

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool._keeper = None
        self.pool.close()
        assert all(not model.closed for _, _, model in self.users)
        for _, context, _ in self.users:
            context.__exit__(None, None, None)
        assert self.machine.there == []
        with pytest.raises(EngineError, match="closed"), self.pool.use("a"):
            pass


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=30)


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    machine = FakeMachine()
    pool = machine.pool(keep_alive_s=None)
    for name in ("a", "b", "c", "a", "d"):
        with pool.use(name):
            pass
    assert [held.name for held in pool.held()] == ["a", "d"]
    pool.close()


def test_many_ask_and_one_loads() -> None:
    machine = FakeMachine(delay_s=0.1)
    pool, models = machine.pool(), []

    def ask() -> None:
        with pool.use("a") as model:
            models.append(model)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.loads == ["a"]
    assert len(set(map(id, models))) == 1
    pool.close()
    assert machine.there == []


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    machine = FakeMachine(delay_s=0.1, broken=True)
    pool, errors = machine.pool(), []

    def ask() -> None:
        try:
            with pool.use("a"):
                pass
        except ModelLoadError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert machine.loads == ["a"]
    machine.broken = False
    with pool.use("a"):
        pass
    pool.close()


def test_threads_hammer_it() -> None:
    """Random models from eight threads: never more memory than there is, never a closed model in anyone's hands."""
    machine, failures = FakeMachine(delay_s=0.0005), []
    pool = machine.pool(keep_alive_s=0.001)

    def hammer(seed: int) -> None:
        for step in range(60):
            name = "abcd"[(seed * 7 + step * (seed + 1)) % 4]
            try:
                with pool.use(name) as model:
                    time.sleep(0.0005)
                    if model.closed or sum(NEEDS[each.name] for each in list(machine.there)) > TOTAL:
                        failures.append((seed, step))
            except OverloadedError:
                continue

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.close()
    assert machine.there == []


def test_the_keep_alive_time_passes_by_itself() -> None:
    machine = FakeMachine()
    pool = machine.pool(keep_alive_s=0.05)
    with pool.use("a"):
        time.sleep(0.1)
        assert machine.there  # in use, however long
    wait_for(lambda: not machine.there)
    pool.close()


def test_from_an_event_loop_also_when_cancelled() -> None:
    machine = FakeMachine(delay_s=0.1)
    pool = machine.pool(keep_alive_s=None)

    async def use() -> str:
        async with pool.use_async("a") as model:
            return model.name

    async def main() -> None:
        cancelled = asyncio.create_task(use())
        await asyncio.sleep(0.02)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await asyncio.gather(use(), use()) == ["a", "a"]
        await asyncio.sleep(0.05)  # the cancelled one gives its share back when its thread is done
        assert machine.loads == ["a"]

    asyncio.run(main())
    assert [(held.name, held.users) for held in pool.held()] == [("a", 0)]
    pool.close()
    assert machine.there == []


def test_nobody_waits_for_a_model_that_is_closed_but_who_needs_its_memory() -> None:
    machine = FakeMachine(close_s=2.0)
    pool = machine.pool(keep_alive_s=None)
    with pool.use("a"), pool.use("c"):
        pass
    closing = threading.Thread(target=pool.unload, args=("a",))
    closing.start()
    time.sleep(0.05)
    with pool.use("c"):
        assert [held.name for held in pool.held()] == ["c"]
        assert closing.is_alive()
        with pool.use("d"):  # fits once "a" is gone
            assert [model.name for model in machine.there] == ["c", "d"]
    closing.join()
    pool.close()
    assert machine.there == []


@pytest.mark.parametrize("ending", ["keep_alive_s=0", "closed"])
def test_an_event_loop_goes_on_while_a_model_is_closed(ending) -> None:
    machine = FakeMachine(close_s=2.0)
    pool, turns = machine.pool(keep_alive_s=0 if ending == "keep_alive_s=0" else None), 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async def main() -> None:
        watching = asyncio.create_task(watch())
        async with pool.use_async("a"):
            if ending == "closed":
                pool.close()
        assert machine.there == []
        watching.cancel()

    asyncio.run(main())
    assert turns > 10  # while it was closed for two seconds
    pool.close()


def test_many_wait_for_a_load_and_take_no_thread_of_the_event_loops() -> None:
    machine = FakeMachine(delay_s=2.0)
    pool = machine.pool(keep_alive_s=None)

    async def use(name: str) -> None:
        async with pool.use_async(name):
            pass

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        await use("b")
        waiting = [asyncio.create_task(use("a")) for _ in range(6)]
        await asyncio.sleep(0.01)
        await asyncio.to_thread(time.sleep, 0)
        await use("b")
        assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)

    asyncio.run(main())
    assert machine.loads == ["b", "a"]
    pool.close()


def test_a_failure_reaches_all_event_loops() -> None:
    machine = FakeMachine(delay_s=0.05, broken=True)
    pool = machine.pool()

    async def use() -> None:
        async with pool.use_async("a"):
            pass

    async def main() -> None:
        found = await asyncio.gather(use(), use(), return_exceptions=True)
        assert [str(error) for error in found] == ["broken", "broken"]

    asyncio.run(main())
    assert machine.loads == ["a"]
    pool.close()
