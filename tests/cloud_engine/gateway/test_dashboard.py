"""The Grafana dashboard in the docs names metrics that exist, by labels that they have, and forgets nearly none."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from updraft.cloud_engine.engine.stats import EngineStats
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.metrics import gateway_metrics
from updraft.cloud_engine.gateway.relay.counters import Counters
from updraft.cloud_engine.node.answers.latency import Latencies
from updraft.cloud_engine.node.api.metrics import node_metrics
from updraft.protocol.errors import AuthenticationError
from updraft.protocol.http.prometheus import render

DASHBOARD = Path(__file__).parents[3] / "docs" / "guides" / "grafana-dashboard.json"
NOT_SHOWN = {"updraft_gateway_node_up", "updraft_gateway_key_requests", "updraft_gateway_key_cost_usd"}


def samples() -> dict[str, set[str]]:
    """The labels of every sample that gateway and node serve, once something has happened."""
    counters = Counters()
    row = UsageRow(request_id="x", key_name="k", model="m", tier="batch", status=200, ttft_ms=1.0, completion_tokens=2)
    counters.count(row)
    counters.streamed(row, 1.0)
    counters.refused(AuthenticationError("no"), "tokens")
    for name in (("node", "url"), ("waiting", "batch"), ("hedge", "won")):
        counters.own.of(*name)
    text = render([*gateway_metrics(counters), *node_metrics(EngineStats(), Latencies(), healthy=True)])
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def expressions() -> list[tuple[str, str]]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]


def test_every_metric_exists_and_has_the_labels_that_it_is_shown_by() -> None:
    known = samples()
    for expression, legend in expressions():
        named = re.findall(r"updraft_\w+", expression)
        assert named
        assert [name for name in named if name not in known] == []
        labels = {label for group in re.findall(r"by \(([\w, ]+)\)", expression) for label in group.split(", ")}
        if not labels:
            labels = set(re.findall(r"{{(\w+)}}", legend)) - {"instance"}
        assert labels <= known[named[0]], expression
        assert set(re.findall(r"{{(\w+)}}", legend)) - {"instance"} <= labels


def test_no_metric_of_the_gateway_is_forgotten() -> None:
    shown = {name for expression, _ in expressions() for name in re.findall(r"updraft_gateway_\w+", expression)}
    families = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in samples()}
    missing = {name for name in families if name.startswith("updraft_gateway")} - {
        re.sub(r"_(total|bucket)$", "", name) for name in shown
    }
    assert missing == NOT_SHOWN
