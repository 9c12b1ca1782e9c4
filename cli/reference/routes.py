"""docs/reference/routes.md: the routes of node, gateway and router, and the errors that they answer with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from starlette.routing import Route

from ...cloud_engine.gateway.access.keys import KeyStore
from ...cloud_engine.gateway.app import create_gateway_app
from ...cloud_engine.gateway.balancing.node import NodeAddress
from ...cloud_engine.gateway.balancing.registry import NodeRegistry
from ...cloud_engine.gateway.limits.accounting import AccountingOptions, open_accounting
from ...cloud_engine.gateway.relay.counters import Counters
from ...cloud_engine.gateway.relay.dispatch import Dispatch
from ...cloud_engine.gateway.relay.relay import Relay
from ...cloud_engine.gateway.relay.response_cache import ResponseCache
from ...cloud_engine.gateway.upstream.client import Upstream
from ...cloud_engine.node.api.app import ServedEngine, create_node_app
from ...embedded.pocket import pocket_large_folder
from ...protocol import errors
from ...router.server.endpoints import ROUTES
from ...text.tokenizer import Tokenizer
from .markdown import code, page, table

_NODE = {
    "/v1/chat/completions": "OpenAI's chat completions",
    "/v1/completions": "OpenAI's text completions: one prompt or up to 128, each as text or token ids",
    "/v1/responses": "OpenAI's Responses: created, and kept nowhere",
    "/v1/responses/input_tokens": "how many tokens the prompt of such a request has",
    "/v1/messages": "Anthropic's Messages; the key may be in `x-api-key`",
    "/v1/messages/count_tokens": "how many tokens the prompt of such a request has",
    "/v1/embeddings": "OpenAI's embeddings: one input or up to 2048, each as text or token ids",
    "/v1/models": "the model, with `max_model_len`: tokens of prompt and answer together",
    "/v1/models/{model}": "the same, of one model",
    "/tokenize": "`prompt`, or `messages` with their `tools`, to `tokens`, `count`, `max_model_len`; as vLLM",
    "/detokenize": "`tokens` to `prompt`; as vLLM",
    "/spent/{attempt}": "what a running answer without a stream has cost so far, by its `x-updraft-attempt`",
    "/health": "200 while the engine serves, else 503 with the reason",
    "/metrics": "see [metrics](metrics.md)",
}
_GATEWAY = {
    "/v1/chat/completions": "relayed to a node that has the model",
    "/v1/completions": "relayed",
    "/v1/embeddings": "relayed",
    "/v1/rerank": "relayed to nodes that have it; others answer 404",
    "/v1/moderations": "the same",
    "/v1/responses": "the same; no other node goes on with a broken stream",
    "/v1/responses/input_tokens": "the same",
    "/v1/messages": "the same; the key may be in `x-api-key`",
    "/v1/messages/count_tokens": "the same",
    "/v1/audio/speech": "the same",
    "/v1/audio/transcriptions": "the same",
    "/v1/audio/translations": "the same",
    "/v1/models": "the models of all nodes that are up, with the least `max_model_len` of their nodes",
    "/v1/models/{model}": "one of them",
    "/health": "200 while a node is up",
    "/metrics": "see [metrics](metrics.md)",
    "/admin/nodes": "GET: the nodes, whether they are up, and why not; scope `admin`. "
    "POST, DELETE: a node's heartbeat, and that it leaves; scope `node`",
    "/admin/usage": "requests and tokens by key and model; scope `usage`",
    "/admin/keys": "list keys, or make one: it is shown this once; scope `admin`",
    "/admin/keys/{key_id}": "revoke it, by id or name; within a second it works nowhere; scope `admin`",
    "/admin/keys/{key_id}/rotate": "a new secret; the old one works for `overlap_s` more seconds; scope `admin`",
    "/admin/audit": "who changed which key when, the last 1,000 changes; scope `admin`",
}
#: Codes that are given where an error is raised, with what they mean.
GIVEN_CODES: dict[str, tuple[type[errors.UpdraftError], str]] = {
    "invalid_json": (errors.InvalidRequestError, "The body is no JSON."),
    "invalid_http": (errors.InvalidRequestError, "What came is no HTTP request, or has two framings."),
    "too_many_headers": (errors.InvalidRequestError, "A request has more than 256 headers."),
    "files_off": (errors.NotFoundError, "The router keeps no files: the setting `files` is off."),
    "invalid_form": (errors.InvalidRequestError, "An upload is no `multipart/form-data`."),
    "store_off": (errors.NotFoundError, "The router keeps no answers: the setting `store` is off."),
    "invalid_value": (errors.InvalidRequestError, "A field has a value that it cannot have; `param` names it."),
    "unsupported_header": (
        errors.InvalidRequestError,
        "A header that is not passed on to a cloud or node; `param` names it.",
    ),
    "invalid_grammar": (
        errors.InvalidRequestError,
        "A schema, regex or grammar is wrong, unsupported, or matches nothing.",
    ),
    "grammar_too_complex": (errors.InvalidRequestError, "Compiling a constraint takes too long or too much memory."),
    "template_too_expensive": (
        errors.InvalidRequestError,
        "The model's chat template takes too long or too much memory for these messages.",
    ),
    "unsupported_message": (
        errors.InvalidRequestError,
        "The model's chat template leaves out a message, however it is put; `param` names it.",
    ),
    "grammar_failed": (errors.InvalidRequestError, "No answer can go on under this constraint."),
    "engine_restarting": (errors.EngineDownError, "The engine died, and another one is being started."),
    "other_user": (errors.PermissionDeniedError, "Another user of the machine started this server, which has no key."),
    "body_memory_exceeded": (errors.RateLimitError, "The bodies of your requests in flight are too large together."),
    "draining": (errors.OverloadedError, "The server is shutting down."),
}
_ERRORS = """The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. `x-should-retry` says whether
the same request may succeed later. `overloaded`, `draining`, `engine_down` and `engine_restarting` have
`retry-after` too."""


def routes_page() -> str:
    return page(
        "Routes and errors",
        "## Node",
        "A node wants `UPDRAFT_NODE_API_KEY`; without one it serves this machine only, on Linux only its own user. "
        "`/health` wants no key.",
        _described(node_app(), _NODE),
        "## Gateway",
        "Routes under `/v1` want a key with the scope `inference`. `/health` and `/metrics` want none.",
        _described(_gateway_app(), _GATEWAY),
        "## Router",
        "`updraft serve` and the SDK answer these.",
        table(
            ("route", "method", "meaning"),
            [(code(route.path.replace(":path", "")), route.method, route.summary) for route in ROUTES],
        ),
        "## Errors",
        _ERRORS,
        table(("status", "code", "retry", "meaning"), sorted(_error_rows())),
    )


def node_app() -> FastAPI:
    engine = cast(Any, SimpleNamespace(close=None))
    return create_node_app(ServedEngine(engine, Tokenizer.from_folder(pocket_large_folder()), "model", 1, "hermes"))


def _gateway_app() -> FastAPI:
    with TemporaryDirectory() as folder:
        accounting = open_accounting(AccountingOptions(str(Path(folder) / "usage.sqlite3")))
        upstream = Upstream(None)
        registry = NodeRegistry([NodeAddress("http://127.0.0.1:1")], upstream)
        about = KeyStore(None), accounting, Counters(), ResponseCache(0, registry)
        app = create_gateway_app(Relay(Dispatch(registry, upstream), *about))
        accounting.ledger.close()
    return app


def _described(app: FastAPI, texts: Mapping[str, str]) -> str:
    """The routes of `app`. Raises ValueError for one without a text, or a text without one."""
    found = [(route.path.replace(":path", ""), route) for route in app.routes if isinstance(route, Route)]
    if mismatched := {path for path, _ in found} ^ set(texts):
        raise ValueError(f"Routes and their descriptions differ: {', '.join(sorted(mismatched))}.")
    rows = [
        (code(path), method, texts[path])
        for path, route in found
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return table(("route", "method", "meaning"), rows)


def _error_rows() -> Iterator[tuple[str, str, str, str]]:
    for error in _tree(errors.UpdraftError):
        if error.default_code:
            yield _error_row(error, error.default_code, _meaning(error))
    for name, (error, text) in GIVEN_CODES.items():
        yield _error_row(error, name, text)


def _error_row(error: type[errors.UpdraftError], name: str, text: str) -> tuple[str, str, str, str]:
    return str(error.status), code(name), "yes" if error.retryable else "", text


def _tree(error: type[errors.UpdraftError]) -> Iterator[type[errors.UpdraftError]]:
    """Those of `protocol.errors`: others may be loaded or not."""
    for each in error.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from _tree(each)


def _meaning(error: type[errors.UpdraftError]) -> str:
    """The first paragraph of the class's own docstring."""
    own = str(error.__dict__.get("__doc__") or "")
    text = " ".join(own.partition("\n\n")[0].split())
    if not text:
        raise ValueError(f"{error.__name__} has no docstring: the page of errors needs one.")
    return text
