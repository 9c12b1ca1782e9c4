"""`/metrics` of the gateway: sums over workers, labels within bounds, what single keys did for their operator only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
from gateway_keys import make_key
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from updraft.cloud_engine.gateway.access.principal import Limits
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.metrics import gateway_metrics
from updraft.cloud_engine.gateway.relay.counters import SECONDS, Counters, ServiceObjective
from updraft.cloud_engine.gateway.relay.shared_rows import SharedRows
from updraft.protocol.errors import AuthenticationError
from updraft.protocol.http.prometheus import render


def read(text: str) -> dict[tuple[str, ...], float]:
    """By the name and the values of the labels."""
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def scraped(counters: Counters, **options: Any) -> dict[tuple[str, ...], float]:
    return read(render(gateway_metrics(counters, **options)))


def row(**fields: Any) -> UsageRow:
    return UsageRow(request_id="x", **{"key_name": "team", "model": "m", "tier": "batch", "status": 200, **fields})


def test_every_worker_tells_the_sums_of_all() -> None:
    rows = SharedRows(3)
    workers = [Counters(rows, number) for number in range(3)]
    for worker in workers:
        worker.count(row(retries=1, prompt_tokens=5, completion_tokens=7, cost_usd=0.25, latency_ms=30.0))
    workers[2].count(row(status=429))
    workers[2].refused(AuthenticationError("no"), "tokens")
    for each in workers:
        scrape = scraped(each)
        assert scrape["updraft_gateway_requests_total", "200"] == 3
        assert scrape["updraft_gateway_requests_total", "429"] == 1
        assert scrape["updraft_gateway_retries_total",] == 3
        assert scrape["updraft_gateway_prompt_tokens_total", "m", "batch"] == 15
        assert scrape["updraft_gateway_key_completion_tokens_total", "team"] == 21
        assert scrape["updraft_gateway_cost_usd_total", "m", "batch"] == 0.75
        assert scrape["updraft_gateway_refused_total", "authentication_error"] == 1
        assert scrape["updraft_gateway_limits_hit_total", "tokens"] == 1
        assert scrape["updraft_gateway_e2e_seconds_bucket", "0.025", "m", "batch"] == 1
        assert scrape["updraft_gateway_e2e_seconds_bucket", "0.05", "m", "batch"] == 4
        assert math.isclose(scrape["updraft_gateway_e2e_seconds_sum", "m", "batch"], 0.09)


def test_replacement_worker_reuses_the_row() -> None:
    rows = SharedRows(2)
    Counters(rows, 1).count(row())
    Counters(rows, 1).count(row(model="n"))
    scrape = scraped(Counters(rows, 0))
    assert [scrape["updraft_gateway_e2e_seconds_count", model, "batch"] for model in "mn"] == [1, 1]


@settings(max_examples=40)
@given(st.lists(st.sets(st.sampled_from("abcdefghij"), max_size=5), max_size=12))
def test_nodes_that_leave_give_their_places_to_others(steps: list[set[str]]) -> None:
    """Fifty to a letter: more than there are places for, but never at once."""
    rows, counted = SharedRows(2), dict[tuple[str, ...], list[list[float]]]()
    for letters in steps:
        names = [(f"http://{letter}{number}",) for letter in letters for number in range(50)]
        counted = {name: [[counted.get(name, [[0]])[0][0] + 1]] for name in names}
        worker = rows.row(1)  # as one that replaces another
        worker.of("status", "200")[0] += 1
        worker.keep_only("node", [("node", *name) for name in names])
        for name in names:
            worker.of("node", *name)[0] += 1
        assert {name: [numbers[:1] for numbers in samples] for name, samples in rows.named("node").items()} == counted
    assert rows.sums("status").get(("200",), [0])[0] == len(steps)


def test_nodes_beyond_all_places_are_shown_together_until_a_place_is_free() -> None:
    rows = SharedRows()
    for first, shown in ((0, 257), (44, 257), (45, 256), (100, 201)):
        names = [("node", str(number)) for number in range(first, 301)]
        row = rows.row(0)
        for _ in range(2):
            row.keep_only("node", names)
            for name in names:
                row.of(*name)[0] = 1
        assert len(rows.named("node")) == shown
        assert (("other",) in rows.named("node")) == (first < 45)


def test_streams_are_measured_against_the_objective() -> None:
    counters = Counters(objective=ServiceObjective(ttft_s=0.5, tpot_s=0.1))
    counters.streamed(row(ttft_ms=500.0, completion_tokens=11), 1.5)
    counters.streamed(row(ttft_ms=501.0, completion_tokens=11), 1.5)
    counters.streamed(row(ttft_ms=10.0, completion_tokens=11), 1.2)
    scrape = scraped(counters)
    assert scrape["updraft_gateway_slo_streams_total", "m", "batch"] == 3
    assert scrape["updraft_gateway_slo_streams_met_total", "m", "batch"] == 1
    assert scrape["updraft_gateway_tpot_seconds_bucket", "0.1", "m", "batch"] == 2
    assert scrape["updraft_gateway_ttft_seconds_bucket", "0.01", "m", "batch"] == 1


def test_labels_stay_within_bounds() -> None:
    counters = Counters()
    for number in range(2000):
        counters.count(row(model=f"m{number}", key_name=f"k{number}", status=200 + number))
    counters.count(row(model="asked for by a stranger to the nodes"), is_served=False)
    counters.count(row(model="a\tb"))
    counters.count(row(model="\U0001f600" * 256))
    scrape = scraped(counters)
    assert len(scrape) < 20_000
    totals = {name: sum(v for key, v in scrape.items() if key[0] == name) for name in {key[0] for key in scrape}}
    assert totals["updraft_gateway_e2e_seconds_count"] == totals["updraft_gateway_key_requests_total"] == 2003
    assert scrape["updraft_gateway_e2e_seconds_count", "other", "batch"] >= 3
    assert not [key for key in scrape if "stranger" in "".join(key)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 400)), max_size=30))
def test_bucket_bounds_are_inclusive(requests: list[tuple[str, float]]) -> None:
    counters = Counters()
    for model, seconds in requests:
        counters.count(row(model=model, latency_ms=seconds * 1e3))
    for model, sums in counters.by_model.items():
        took = [seconds * 1e3 / 1e3 for its_model, seconds in requests if its_model == model[0]]
        distribution = sums.distribution("e2e")
        assert sum(distribution.counts) == len(took)
        assert [sum(distribution.counts[: at + 1]) for at in range(len(SECONDS))] == [
            sum(seconds <= bound for seconds in took) for bound in SECONDS
        ]


def test_metrics_per_key_need_the_usage_scope(spawn: Any, fake_node: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    limits = Limits(requests_per_minute=2)
    key = make_key(keys, "canary", "inference", "usage", limits=limits)
    weak = make_key(keys, "weak", "inference")
    command = ["gateway", "--port", "0", "--keys", str(keys), "--ledger", str(tmp_path / "db"), "--exit-with-parent"]
    url = spawn("-m", "updraft", *command, "--node", fake_node.url).url
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "unknown"}, headers=headers)
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 429
    public, full = httpx.get(f"{url}/metrics"), httpx.get(f"{url}/metrics", headers=headers)
    assert "canary" not in public.text
    assert "unknown" not in full.text
    scrape = read(full.text)
    assert scrape["updraft_gateway_key_requests_total", "canary"] == 3
    assert scrape["updraft_gateway_limits_hit_total", "requests"] == 1
    assert scrape["updraft_gateway_refused_total", "rate_limit_error"] == 1
    assert scrape["updraft_gateway_slo_streams_total", "echo", "interactive"] == 1
    assert scrape["updraft_gateway_node_up", fake_node.url] == 1
    assert scrape["updraft_gateway_node_breaker_state", fake_node.url] == 0
    assert scrape["updraft_gateway_waiting", "batch"] == 0
    assert scrape["updraft_gateway_ledger_failures_total",] == 0
    lesser = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {weak}"})
    assert lesser.status_code == 200
    assert "canary" not in lesser.text
    unknown = httpx.get(f"{url}/admin/usage?sice=7d", headers=headers)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "sice")
    assert httpx.get(f"{url}/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
