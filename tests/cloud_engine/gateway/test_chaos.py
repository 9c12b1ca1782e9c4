"""Workers, gateways and nodes are killed and stopped under clients: each request has one row, each its answer."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from gateway_chaos import Attempt, Clients, all_at_once, make_trouble
from gateway_cluster import CONCURRENT, Cluster, cluster

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
#: Of the answers that end whole. On a machine that is busy with other tests, probes are late and nodes are left alone.
WHOLE_SHARE = {12: 0.5, 300: 0.99, 1000: 0.99}
REAL_NODES = {12: 1, 300: 3, 1000: 3}  # they take long to start


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        12,
        pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_no_request_is_lost_or_counted_twice(tmp_path: Path, kills: int) -> None:
    with cluster(tmp_path, REAL_NODES[kills]) as target:
        clients = Clients(target)
        clients.start()
        try:
            done = make_trouble(target, clients, kills)
        finally:
            clients.stop()
        burst = all_at_once(target, CONCURRENT)
        assert all(each.is_whole for each in burst), f"a reservation leaked: {Counter(each.error for each in burst)}"
        assert target.gateway is not None
        target.gateway.popen.terminate()
        assert target.gateway.popen.wait(60) == 0
        print(done, Counter((each.model, each.status, each.error, each.broke) for each in clients.attempts))
        check_answers(clients.attempts, target, WHOLE_SHARE[kills])
        check_ledger([*clients.attempts, *burst], target)
        assert not target.outlived, "cores whose nodes are dead"
        assert not [log.read_text() for log in tmp_path.glob("log-*") if "Traceback" in log.read_text()]


def was_hit(attempt: Attempt, target: Cluster) -> bool:
    """Whether a worker was killed while the request ran."""
    return any(attempt.began <= end and begin <= attempt.ended for begin, end in target.kills)


def check_answers(attempts: list[Attempt], target: Cluster, whole_share: float) -> None:
    """An answer or an error for each; a connection breaks only where a worker dies."""
    for each in attempts:
        assert each.broke != "timeout", each
        assert each.is_whole or each.error or each.broke, each
        if each.broke:
            assert was_hit(each, target), (each, target.kills)
        if each.is_whole:
            assert each.text == each.expected
    spared = [each for each in attempts if not each.broke]
    whole = sum(each.is_whole for each in spared)
    assert len(spared) >= 50
    assert whole >= whole_share * len(spared), Counter((each.model, each.message) for each in spared)


def check_ledger(attempts: list[Attempt], target: Cluster) -> None:
    """One row for each request that was answered, with the tokens that the client was told."""
    rows = target.rows()
    counts = Counter(row["request_id"] for row in rows)
    assert {row["state"] for row in rows} <= {"settled", "abandoned"}
    assert not counts.keys() - {each.id for each in attempts}
    by_id = {row["request_id"]: row for row in rows}
    for each in attempts:
        assert counts[each.id] == 1 if each.status else counts[each.id] <= 1, each
        if not each.is_whole:
            assert each.broke or by_id[each.id]["status"] != 200, (each, by_id[each.id])
            continue
        row = by_id[each.id]
        assert (row["state"], row["status"]) == ("settled", 200), (each, row)
        told = each.usage["prompt_tokens"], each.usage["completion_tokens"]
        assert (row["prompt_tokens"], row["completion_tokens"]) == told, (each, row)
        if each.model == "echo":
            assert told[1] == len(each.expected)
