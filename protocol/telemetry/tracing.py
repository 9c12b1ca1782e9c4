"""OpenTelemetry tracing, enabled by OTEL_EXPORTER_OTLP_ENDPOINT; otherwise nothing is loaded or recorded.

Names follow the GenAI conventions of the schema below. Prompts and answers are never recorded. Parent spans are passed
explicitly, between processes as W3C `traceparent`, so that streams and threads need no context variables.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Literal

from ..errors import MissingDependencyError

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
"""Last schema that contains the GenAI conventions, which later moved to a separate registry."""

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FLUSH_MS = 2000
_CARRIED = ("traceparent", "tracestate")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}

Kind = Literal["INTERNAL", "SERVER", "CLIENT"]
Attributes = Mapping[str, str | int | float | bool]


class Span:
    """Step of a request. Records nothing if tracing is off."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Any = None, span: Any = None) -> None:
        self._tracer = tracer
        self._span = span
        self._context: Any = None if span is None else import_module("opentelemetry.trace").set_span_in_context(span)

    @contextmanager
    def child(self, name: str, kind: Kind = "INTERNAL", attributes: Attributes | None = None) -> Generator[Span]:
        """Start a child span that ends with the block."""
        if self._span is None:
            yield self
            return
        span = _started(self._tracer, name, kind, attributes, self._context)
        try:
            yield span
        except BaseException as error:
            span.end(error=type(error).__name__)
            raise
        span.end()

    def set(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """End the span. `error` is the type of the failure, if any. Further calls have no effect."""
        if self._span is None or not self._span.is_recording():
            return
        self._span.set_attributes(attributes or {})
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(import_module("opentelemetry.trace").StatusCode.ERROR)
        self._span.end()

    def headers(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers `given` with this span as the parent of the receiver's spans."""
        return given if self._span is None else {**given, **_injected(self._context)}


class Tracer:
    """Source of a service's root spans. A root span continues the trace of the caller, if any."""

    def __init__(self, service: str) -> None:
        """Start the exporter if tracing is enabled. Raises MissingDependencyError if OpenTelemetry is not installed."""
        self._provider: Any = _provider(service) if os.environ.get(ENDPOINT_VARIABLE) else None
        self._tracer: Any = self._provider and self._provider.get_tracer("updraft", schema_url=SCHEMA_URL)

    def request(self, path: str, headers: Mapping[str, str], kind: Kind = "SERVER") -> Span:
        """Start the span of a request. `headers`, by lower-case name, may hold the caller's span."""
        if self._tracer is None:
            return Span()
        operation = _OPERATIONS.get(path, path)
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "updraft"}
        parent = _propagator().extract({name: headers[name] for name in _CARRIED if name in headers})
        return _started(self._tracer, operation, kind, attributes, parent)

    def flush(self) -> None:
        """Send pending spans, for processes that exit without running exit handlers."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)


def usage(prompt_tokens: int, completion_tokens: int) -> Attributes:
    return {"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": completion_tokens}


def callers_headers() -> Mapping[str, str]:
    """Return headers with the current span of the app that calls the SDK, if any."""
    return _injected(None) if os.environ.get(ENDPOINT_VARIABLE) else {}


def _injected(context: Any) -> Mapping[str, str]:
    carrier: dict[str, str] = {}
    _propagator().inject(carrier, context)
    return carrier


def _started(tracer: Any, name: str, kind: Kind, attributes: Attributes | None, parent: Any) -> Span:
    kinds = import_module("opentelemetry.trace").SpanKind
    return Span(tracer, tracer.start_span(name, parent, kinds[kind], attributes))


@cache
def _propagator() -> Any:
    return import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()


@cache
def _provider(service: str) -> Any:
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = import_module("opentelemetry.sdk.resources")
        sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
    except ImportError as error:
        raise MissingDependencyError(
            f"{ENDPOINT_VARIABLE} enables tracing: pip install '.[otel]' in a clone of Updraft, or unset the variable."
        ) from error
    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
    provider = sdk.TracerProvider(resource=resources.Resource.create(attributes))
    provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter()))
    return provider
