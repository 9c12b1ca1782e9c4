"""The rules of balancing, without any network: the node of a request, its wait, and nodes that are kept out."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.bench.gateway.affinity import read_trace, replay
from updraft.cloud_engine.gateway.balancing.affinity import Placement, PrefixIndex
from updraft.cloud_engine.gateway.balancing.node import Model, Node, NodeAddress, part_of_worker
from updraft.cloud_engine.gateway.balancing.quarantine import NodeFailure, Quarantine, RetryBudget
from updraft.cloud_engine.gateway.balancing.request_queue import PRIORITIES, Priority, QueuePlace, RequestQueue
from updraft.cloud_engine.gateway.balancing.selection import NodeSelector
from updraft.protocol.errors import ConfigurationError, OverloadedError, QuarantinedRequestError

TRACE = Path(__file__).parents[4] / "shared/data/traces/mooncake/conversation_trace.jsonl"


def nodes(count: int) -> list[Node]:
    return [Node(NodeAddress(f"http://node{number}")) for number in range(count)]


def chat(text: str, key: str = "key", session: str = "") -> Placement:
    return Placement.of(
        key, "m", b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % text.encode(), session
    )


def test_a_conversation_goes_back_to_its_node_unless_that_is_much_busier() -> None:
    some, selector = nodes(4), NodeSelector(random=Random(0))
    home = selector.choose(some, chat("x" * 8000))
    for _ in range(20):
        assert selector.choose(some, chat("x" * 8000 + " and then?")) is home
    home.tokens_in_flight = 100_000
    assert selector.choose(some, chat("x" * 8000 + " and then?")) is not home


def test_a_node_that_was_started_again_has_seen_nothing() -> None:
    some, selector = nodes(2), NodeSelector(random=Random(0))
    for node in some:
        node.serves([Model("m", "updraft", created=1)])
    home = selector.choose(some, chat("x" * 8000))
    home.tokens_in_flight = 1000
    assert selector.choose(some, chat("x" * 8000)) is home
    home.serves([Model("m", "updraft", created=2)])
    assert selector.choose(some, chat("x" * 8000)) is not home


def test_sessions_and_prefixes_belong_to_one_key_and_node() -> None:
    index = PrefixIndex()
    index.add("a", chat("x" * 8000, "alice", "talk"))
    assert index.share_of("a", chat("x" * 8000, "alice")) > 0.8
    assert index.share_of("a", chat("other", "alice", "talk")) > 1
    assert index.share_of("a", chat("x" * 8000, "bob", "talk")) == 0
    assert index.share_of("b", chat("x" * 8000, "alice", "talk")) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 40)), max_size=60), st.integers(1, 50))
def test_a_full_index_forgets_prefixes_and_invents_none(prompts: list[tuple[int, int]], pairs: int) -> None:
    small, large = PrefixIndex(pairs), PrefixIndex()
    for kind, length in prompts:
        placement = chat(f"{kind}" * 1024 * length)
        for index in (small, large):
            index.add("a", placement)
        assert small.share_of("a", placement) <= large.share_of("a", placement)
        assert large.share_of("a", placement) > 0.4
    for kind in {0, 1, 2, 3} - {kind for kind, _ in prompts}:
        assert small.share_of("a", chat(f"{kind}" * 1024 * 40)) == 0


def test_two_nodes_at_random_and_the_less_busy_of_them() -> None:
    some, selector = nodes(4), NodeSelector(random=Random(0))
    some[2].tokens_in_flight = 10_000
    chosen = Counter(selector.choose(some, chat("short")).url for _ in range(300))
    assert some[2].url not in chosen
    assert min(chosen.values()) > 50


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not here")
def test_most_of_what_one_cache_could_hold_is_found_over_four_nodes() -> None:
    figures = replay(read_trace(TRACE, 4000), nodes=4, workers=4)
    assert figures["share_of_ideal"] > 0.9
    assert figures["imbalance"] < 1.5


def test_invalid_traces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigurationError, match="Mooncake"):
        read_trace(tmp_path / "trace", 10)


def test_errors_that_other_nodes_did_not_make_take_a_node_out_and_probes_bring_it_back() -> None:
    [node] = nodes(1)
    assert not node.healthy
    node.probed()
    assert node.healthy
    for _ in range(4):
        node.erred()
    assert node.healthy
    node.erred()
    assert (node.healthy, node.breaker.trips) == (False, 1)
    assert "other nodes answered" in node.breaker.reason
    node.probed()
    assert not node.healthy
    node.probed()
    assert node.breaker.needs_trial
    node.breaker.succeeded()
    assert node.breaker.state == "closed"


def test_a_request_that_failed_two_nodes_is_kept_out_for_a_while() -> None:
    now = [1000.0]
    quarantine, body = Quarantine(lambda: now[0]), (b"key", b"body")
    for _ in range(10):
        quarantine.failed(NodeFailure("a", since=999), *body)  # ten requests alike at a node that died once
    quarantine.check(*body)
    quarantine.failed(NodeFailure("b", since=999), *body)
    with pytest.raises(QuarantinedRequestError, match=r"2 nodes failed .* for the next 300 s"):
        quarantine.check(*body)
    quarantine.check(b"another key", b"body")
    quarantine.answered(*body)
    quarantine.check(*body)
    quarantine.failed(NodeFailure("a", since=1000.5), *body)
    quarantine.failed(NodeFailure("a", since=1001), *body)  # it was up again
    now[0] += 299
    with pytest.raises(QuarantinedRequestError, match="for the next 1 s"):
        quarantine.check(*body)
    now[0] += 2
    quarantine.check(*body)
    quarantine.failed(NodeFailure("b", now[0]), *body)  # that was long ago
    quarantine.check(*body)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=4, max_size=4))
def test_request_fails_on_at_most_four_nodes(
    deaths: list[tuple[str, bool]],
) -> None:
    now, most = 1000.0, next((n for n, (_, further) in enumerate(deaths[1:], 2) if not further), 4)
    quarantine = Quarantine(lambda: now)
    for node, got_further in deaths[:most]:
        quarantine.check(b"body")
        since, now = now + 1, now + 2
        quarantine.failed(NodeFailure(node, since, got_further), b"body")
    with pytest.raises(QuarantinedRequestError, match=f"^{most} nodes"):
        quarantine.check(b"body")


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget()
    while budget.take():
        pass
    taken = 0
    for _ in range(1000):
        budget.requested()
        taken += budget.take()
    assert 190 <= taken <= 200


class Crowd:
    """Requests at nodes of limited capacity, placed by the rules of the registry."""

    def __init__(self, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.queue = RequestQueue(most)

    def take(self) -> Node | None:
        if self.capacity == 0:
            return None
        self.capacity -= 1
        return NODE

    def give_back(self, _node: Node) -> None:
        self.capacity += 1
        self.queue.serve()

    async def ask(self, priority: Priority, done: list[Priority]) -> None:
        await self.queue.wait(QueuePlace(priority), "m", self.take, self.give_back)
        done.append(priority)


NODE = nodes(1)[0]


@pytest.mark.parametrize(("whole", "workers", "parts"), [(2, 4, [1, 1, 1, 1]), (7, 3, [3, 2, 2]), (0, 2, [0, 0])])
def test_each_worker_gets_a_part_of_a_limit(whole: int, workers: int, parts: list[int]) -> None:
    assert [part_of_worker(whole, workers, worker) for worker in range(workers)] == parts


def test_without_a_queue_idle_nodes_are_used() -> None:
    async def run() -> None:
        crowd = Crowd(1, 0)
        crowd.queue.check(QueuePlace())
        with pytest.raises(OverloadedError):
            await crowd.ask("interactive", [])

    asyncio.run(run())


@settings(deadline=None)
@given(st.lists(st.sampled_from(PRIORITIES), max_size=30), st.integers(0, 3), st.integers(0, 8), st.randoms())
def test_the_line_keeps_its_bound_and_its_order_and_loses_no_capacity(
    asked: list[Priority], capacity: int, most: int, random: Random
) -> None:
    async def run() -> None:
        crowd, done = Crowd(capacity, most), list[Priority]()
        tasks = list[asyncio.Task[None]]()
        for priority in asked:
            tasks.append(asyncio.create_task(crowd.ask(priority, done)))
            await asyncio.sleep(0)
            assert len(crowd.queue) <= most
        for task in tasks:
            if random.random() < 0.2:
                task.cancel()
        await asyncio.sleep(0)
        started = len(done)
        shed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
        assert all(isinstance(task.exception(), OverloadedError) for task in shed)
        for _ in asked:
            if len(crowd.queue) or crowd.capacity < capacity:
                crowd.give_back(NODE)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        assert len(crowd.queue) == 0
        later = done[started:]
        assert later == sorted(later, key=PRIORITIES.index)

    asyncio.run(run())


def test_the_lowest_class_is_shed_first_and_the_latest_of_it() -> None:
    async def run() -> list[str]:
        crowd, done = Crowd(0, 2), list[Priority]()
        tasks = dict[str, asyncio.Task[None]]()
        order: tuple[Priority, ...] = ("batch", "batch", "interactive", "escalation", "escalation", "interactive")
        for number, priority in enumerate(order):
            tasks[f"{priority} {number}"] = asyncio.create_task(crowd.ask(priority, done))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [name for name, task in tasks.items() if task.done()]
        assert all(isinstance(tasks[name].exception(), OverloadedError) for name in refused)
        for _ in range(2):
            crowd.give_back(NODE)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return refused

    assert asyncio.run(run()) == ["batch 0", "batch 1", "escalation 3", "escalation 4"]


@given(st.lists(st.sampled_from("aaaabbc"), min_size=1, max_size=40), st.integers(1, 9))
def test_tenants_take_turns_and_the_largest_is_evicted(asked: str, most: int) -> None:
    """A tenant with fewer places than the largest one always gets a place, after one turn of each other tenant."""

    async def run() -> None:
        queue, free, served = RequestQueue(most), [0], list[str]()

        def take() -> Node | None:
            free[0] -= 1
            return NODE if free[0] >= 0 else None

        async def ask(tenant: str) -> None:
            await queue.wait(QueuePlace(tenant=tenant), "m", take, lambda _: None)
            served.append(tenant)

        waiting, tasks = Counter[str](), list[tuple[str, asyncio.Task[None]]]()
        for tenant in asked:
            tasks.append((tenant, asyncio.create_task(ask(tenant))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # an evicted request gets its error
            largest = max(waiting.values(), default=0)
            waiting = Counter(name for name, task in tasks if not task.done())
            assert waiting.total() <= most
            assert waiting[tenant] or largest <= 1 + waiting[tenant]
        await asyncio.sleep(0)
        waiting = Counter(name for name, task in tasks if not task.done())
        for _ in range(waiting.total()):
            free[0] = 1
            queue.serve()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert Counter(served) == waiting
        rounds = [served[at : at + len(waiting)] for at in range(0, len(waiting) * min(waiting.values()), len(waiting))]
        assert all(len(set(each)) == len(waiting) for each in rounds)
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    asyncio.run(run())


def test_a_waiter_that_leaves_as_another_is_shed_frees_a_place() -> None:
    async def run() -> None:
        crowd, done = Crowd(0, 1), list[Priority]()
        leaving = asyncio.create_task(crowd.ask("batch", done))
        await asyncio.sleep(0)
        leaving.cancel()
        coming = asyncio.create_task(crowd.ask("interactive", done))
        await asyncio.sleep(0)
        crowd.give_back(NODE)
        await coming
        assert leaving.cancelled()

    asyncio.run(run())
