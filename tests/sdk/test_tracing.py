"""One trace from the app through gateway and node: a local OTLP receiver gets it, and nothing of prompt or answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from server_processes import FAKE_NODE, TYPING, running
from updraft.protocol.telemetry.tracing import SCHEMA_URL, Tracer

APP = """
import sys, updraft
with updraft.OpenAI(cloud_url=sys.argv[1] + "/v1", cloud_model="echo", local=None) as client:
    ask = {"model": "cloud", "messages": [{"role": "user", "content": "canary prompt"}]}
    assert client.chat.completions.create(**ask).choices[0].message.content
    assert list(client.chat.completions.create(**ask, stream=True))
"""


@contextmanager
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """A collector that keeps what it is sent."""
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def spans_in(received: list[bytes]) -> list[tuple[str, Any]]:
    """(service, span) of all that came."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[tuple[str, Any]] = []
    for body in list(received):
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"]
            for scope in resource.scope_spans:
                assert scope.schema_url == SCHEMA_URL
                spans += [(names[0], span) for span in scope.spans]
    return spans


def test_one_trace_goes_from_the_app_to_the_node(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    path = os.pathsep.join([str(TYPING), os.environ.get("PYTHONPATH", "")])
    with receiver() as (endpoint, received):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", "PYTHONPATH": path}
        command = ["-m", "updraft", "gateway", "--port", "0", "--no-auth", "--ledger", str(tmp_path / "db"), "--node"]
        with running(str(FAKE_NODE), **variables) as node, running(*command, node.url, **variables) as gateway:
            environment = {**os.environ, **variables, "UPDRAFT_HOME": str(tmp_path)}
            subprocess.run([sys.executable, "-c", APP, gateway.url], env=environment, check=True, timeout=120)
            deadline = time.monotonic() + 60
            while len(spans_in(received)) < 14 and time.monotonic() < deadline:
                time.sleep(0.05)
    spans = spans_in(received)
    traces = {span.trace_id for _, span in spans}
    assert len(traces) == 2, "one for each request"
    for trace in traces:
        of_it = [(service, span) for service, span in spans if span.trace_id == trace]
        names = sorted((service, span.name) for service, span in of_it)
        assert names == [
            ("updraft", "chat"),
            ("updraft", "chat"),
            ("updraft", "escalate"),
            ("updraft", "gate rules"),
            ("updraft-gateway", "chat"),
            ("updraft-gateway", "relay"),
            ("updraft-node", "chat"),
        ]
        parents = {span.span_id: span.parent_span_id for _, span in of_it}
        chain = next(span.span_id for service, span in of_it if service == "updraft-node")
        length = 0
        while chain:  # node, relay, gateway, call, request
            chain, length = parents[chain], length + 1
        assert length == 5
        for service, span in of_it:
            if service != "updraft":
                about = {each.key: each.value for each in span.attributes}
                if span.name == "chat":
                    assert about["gen_ai.request.model"].string_value == "echo"
                    assert about["gen_ai.usage.output_tokens"].int_value == len("canary prompt")
    assert not [body for body in received if b"canary" in body]


def test_without_an_endpoint_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    span = Tracer("updraft").request("/v1/chat/completions", {})
    with span.child("step") as step:
        assert step.headers({"traceparent": "theirs"}) == {"traceparent": "theirs"}


def test_without_the_extra_an_endpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['opentelemetry.sdk'] = None; from updraft.cli.main import main; main()"
    command = ["gateway", "--no-auth", "--port", "0", "--node", "http://127.0.0.1:1", "--ledger", str(tmp_path / "db")]
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", hidden, *command],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert ".[otel]" in done.stderr
    assert "Traceback" not in done.stderr
