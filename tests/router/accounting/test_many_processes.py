"""One ledger of daemons, apps and commands that come, go and are killed: every answer has one row, budgets hold."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from ledger_chaos import LIMIT, TOKENS, Daemon, SharedHome, command, ids_in, make_trouble
from router_fakes import FakeCloud

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by signal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds",
    [20, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_every_answer_has_one_row_and_budgets_hold(cloud: FakeCloud, tmp_path: Path, rounds: int) -> None:
    home = SharedHome(tmp_path, cloud)
    daemons = [Daemon(home) for _ in range(2)]
    try:
        make_trouble(home, daemons, rounds, seed=rounds)
    finally:
        for daemon in daemons:
            daemon.end()
    home.run(command, "log")  # enters what killed processes left
    rows = Counter(ids_in(home.ledger))
    assert home.faults == []
    assert [each for each in home.answered if each not in rows] == []
    assert set(rows.values()) == {1}
    assert len(home.answered) > rounds
    assert home.refused, "the budget was reached"
    assert {user: n for user, n in home.users.items() if n * TOKENS > LIMIT} == {}
