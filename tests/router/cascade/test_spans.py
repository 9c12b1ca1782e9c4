"""Spans of a request through the cascade: gates, local generation and escalation are steps of it, without its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud, ScriptedGates
from updraft.protocol.telemetry import tracing

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The spans that are over."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setenv(tracing.ENDPOINT_VARIABLE, "http://127.0.0.1:1")
    monkeypatch.setattr(tracing, "_provider", lambda _service: provider)
    return exporter


@pytest.mark.parametrize("stream", [False, True])
def test_an_escalated_request_tells_its_steps(finished: Any, bench: Any, cloud: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            await (b.stream() if stream else b.answer())

    run(test())
    spans = finished.get_finished_spans()
    assert [span.name for span in spans] == [
        "gate rules",
        "gate before",
        "generate local",
        "gate after",
        "chat",
        "escalate",
        "chat",
    ]
    request = spans[-1]
    assert request.attributes["updraft.route"] == "escalated"
    assert request.attributes["gen_ai.usage.output_tokens"] > 0
    assert {span.context.trace_id for span in spans} == {request.context.trace_id}
    assert all(span.parent.span_id == request.context.span_id for span in spans[:-1])
    assert "hello" not in json.dumps([dict(span.attributes) for span in spans])


def test_failed_spans_are_marked(finished: Any, bench: Any) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(), has_local=False, fallback="never", cloud_url="http://127.0.0.1:1/v1") as b:
            await b.answer("cloud")

    run(test())
    spans = {span.name: span for span in finished.get_finished_spans()}
    assert spans["chat"].attributes["error.type"] == "502"
    assert spans["chat"].status.status_code.name == "ERROR"
