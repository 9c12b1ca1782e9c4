"""docs/operations.md says what the servers have: every route and every metric, and none that is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from exposition import parse
from fastapi import FastAPI
from starlette.routing import Route
from updraft.cloud_engine.engine.stats import EngineStats
from updraft.cloud_engine.gateway.app import create_gateway_app
from updraft.cloud_engine.gateway.keys import KeyStore
from updraft.cloud_engine.gateway.metering import Meter
from updraft.cloud_engine.gateway.metrics import gateway_metrics
from updraft.cloud_engine.gateway.nodes import NodeRegistry
from updraft.cloud_engine.gateway.relay import Counters, Relay
from updraft.cloud_engine.gateway.upstream import Upstream
from updraft.cloud_engine.node.answers.latency import Latencies
from updraft.cloud_engine.node.api.app import Served, create_node_app
from updraft.cloud_engine.node.api.metrics import node_metrics
from updraft.protocol import errors
from updraft.protocol.prometheus import render
from updraft.router.feedback.collector import LearningCounts

sys.path.insert(0, str(Path(__file__).parent))
from fake_node import CONTEXT, FakeEngine, byte_tokenizer

PAGE_PATH = Path(__file__).parents[2] / "docs" / "operations.md"
PAGE = PAGE_PATH.read_text()
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<kind>\w+) \| (?P<text>[^|]*?) \|", re.MULTILINE)


def rows(server: str) -> list[tuple[str, str, str]]:
    """The tables of one server's section that begin with a name in backticks and one word."""
    section = next(part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(server))
    return [(match["name"], match["kind"], match["text"]) for match in _ROW.finditer(section)]


def documented_routes(server: str) -> set[tuple[str, str]]:
    return {(name, kind) for name, kind, _ in rows(server) if name.startswith("/")}


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(path, method); HEAD comes with GET."""
    found = [route for route in app.routes if isinstance(route, Route)]
    return {
        (route.path.replace(":path", ""), method) for route in found for method in (route.methods or set()) - {"HEAD"}
    }


def test_the_nodes_routes() -> None:
    tokenizer = byte_tokenizer()
    app = create_node_app(Served(FakeEngine(tokenizer, 0), tokenizer, "echo", CONTEXT))
    assert documented_routes("Node") == routes_of(app)


#: What a node answers with, by the class's own code or by one that is given where it is raised.
NODE_ERRORS = [
    errors.UnsupportedFeatureError,
    errors.ContextLengthError,
    errors.NotFoundError,
    errors.ModelNotFoundError,
    errors.MethodNotAllowedError,
    errors.RequestTooLargeError,
    errors.EngineError,
    errors.EngineRestartedError,
    errors.EngineDownError,
    errors.OverloadedError,
]
GIVEN_CODES = {
    "invalid_json": errors.InvalidRequestError,
    "invalid_value": errors.InvalidRequestError,
    "invalid_grammar": errors.InvalidRequestError,
    "grammar_too_complex": errors.InvalidRequestError,
    "grammar_failed": errors.InvalidRequestError,
    "engine_restarting": errors.EngineDownError,
    "draining": errors.OverloadedError,
}
SOURCES = ["cloud_engine/node", "cloud_engine/engine", "text", "protocol"]


def documented_errors() -> set[tuple[int, str]]:
    """(status, code) of the node's table."""
    found = re.findall(r"^\| (\d{3}) \| (`[^|]*|) \|", PAGE.partition("## Gateway")[0], re.MULTILINE)
    return {(int(status), code) for status, codes in found for code in re.findall(r"`(\w+)`", codes)}


def test_the_nodes_errors() -> None:
    own = {(error.status, str(error.default_code)) for error in NODE_ERRORS}
    assert documented_errors() == own | {(error.status, code) for code, error in GIVEN_CODES.items()}


def test_no_code_is_given_that_is_not_known_here() -> None:
    files = [file for folder in SOURCES for file in (PAGE_PATH.parents[1] / folder).rglob("*.py")]
    assert {code for file in files for code in re.findall(r'\bcode="(\w+)"', file.read_text())} <= set(GIVEN_CODES)


def test_what_is_said_of_their_headers() -> None:
    by_status = {error: error("x").headers() for error in NODE_ERRORS}
    again = {error for error, headers in by_status.items() if headers["x-should-retry"] == "true"}
    assert again == {error for error in NODE_ERRORS if error.status == 503} | {errors.EngineRestartedError}
    assert {error for error, headers in by_status.items() if "retry-after" in headers} == {
        errors.EngineDownError,
        errors.OverloadedError,
    }


@pytest.fixture
def registry() -> NodeRegistry:
    return NodeRegistry(["http://127.0.0.1:1"], Upstream(None))


def test_the_gateways_routes(registry: NodeRegistry, tmp_path: Path) -> None:
    meter = Meter(tmp_path / "usage.sqlite")
    relay = Relay(registry, Upstream(None), KeyStore(()), meter, Counters(), 1.0)
    assert documented_routes("Gateway") == routes_of(create_gateway_app(relay))
    meter.close()


def families(metrics: list[Any]) -> set[tuple[str, str, str]]:
    return {(family.name, family.kind, family.help) for family in parse(render(metrics)).values()}


def documented_metrics(server: str) -> set[tuple[str, str, str]]:
    return {row for row in rows(server) if row[0].startswith("updraft_")}


def test_metrics(registry: NodeRegistry) -> None:
    assert documented_metrics("Node") == families(node_metrics(EngineStats(), Latencies(), healthy=True))
    assert documented_metrics("Gateway") == families(gateway_metrics(registry.nodes, Counters()))
    assert documented_metrics("Router") == families(LearningCounts().metrics())
