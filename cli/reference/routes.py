"""docs/reference/routes.md: routes and errors of node, gateway and router."""

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
from ...cloud_engine.node.api.app import NodeEngine, create_node_app
from ...embedded.pocket import pocket_large_folder
from ...protocol import errors
from ...router.server.endpoints import ROUTES
from ...text.tokenizer import Tokenizer
from .markdown import code, page, table

_NODE = {
    "/v1/chat/completions": "OpenAI's chat completions",
    "/v1/completions": "OpenAI's text completions: one prompt or up to 128, each as text or token ids",
    "/v1/responses": "OpenAI's Responses, without storage",
    "/v1/responses/compact": "summary of a conversation, to continue from",
    "/v1/responses/input_tokens": "number of prompt tokens of a Responses request",
    "/v1/messages": "Anthropic's Messages; the key may be in `x-api-key`",
    "/v1/messages/count_tokens": "number of prompt tokens of a Messages request",
    "/v1/embeddings": "OpenAI's embeddings: one input or up to 2048, each as text or token ids",
    "/v1/models": "the model, with `max_model_len`: most tokens of prompt and answer together",
    "/v1/models/{model}": "the model of this name, with `max_model_len`",
    "/tokenize": "converts `prompt`, or `messages` with `tools`, to `tokens`, `count`, `max_model_len`; as in vLLM",
    "/detokenize": "converts `tokens` to `prompt`; as in vLLM",
    "/spent/{attempt}": "tokens used so far by a running unstreamed request, which its `x-updraft-attempt` identifies",
    "/sleep": "frees memory until `/wake_up`. `level=1`: the KV cache, and weights on a GPU move to host memory; "
    "`level=2`: the engine's process ends. 409 if requests are in flight after `--drain-timeout-s`. As in vLLM",
    "/wake_up": "ends the sleep, and answers once the node serves",
    "/is_sleeping": "whether the node sleeps, as `is_sleeping`",
    "/health": "200 while the engine serves, else 503 with the reason",
    "/metrics": "see [metrics](metrics.md)",
}
_GATEWAY = {
    "/v1/chat/completions": "relayed to a node that has the model",
    "/v1/completions": "relayed",
    "/v1/embeddings": "relayed",
    "/v1/rerank": "relayed; nodes without this route answer 404",
    "/v1/moderations": "relayed; nodes without this route answer 404",
    "/v1/responses": "relayed; nodes without this route answer 404; no other node continues a broken stream",
    "/v1/responses/input_tokens": "relayed; nodes without this route answer 404",
    "/v1/messages": "relayed; nodes without this route answer 404; the key may be in `x-api-key`",
    "/v1/messages/count_tokens": "relayed; nodes without this route answer 404",
    "/v1/audio/speech": "relayed; nodes without this route answer 404",
    "/v1/audio/transcriptions": "relayed; nodes without this route answer 404",
    "/v1/audio/translations": "relayed; nodes without this route answer 404",
    "/v1/models": "the models of all nodes that are up, with the smallest `max_model_len` of their nodes",
    "/v1/models/{model}": "the model of this name, with the smallest `max_model_len` of its nodes",
    "/health": "200 while a node may answer, else 503; `degraded` without healthy nodes, `ledger`, `keys` or `limits`",
    "/metrics": "see [metrics](metrics.md)",
    "/admin/nodes": "GET: the nodes, with the reason if a node is down; scope `admin`. "
    "POST: heartbeat of a node; DELETE: end of its registration; scope `node`",
    "/admin/usage": "requests and tokens by key and model; scope `usage`",
    "/admin/keys": "list keys, or create a key, which is shown only once; scope `admin`",
    "/admin/keys/{key_id}": "revoke a key, by id or name; takes effect within a second; scope `admin`",
    "/admin/keys/{key_id}/rotate": "replace a key; the old key stays valid for `overlap_s` seconds; scope `admin`",
    "/admin/audit": "the last 1,000 changes to keys: time, actor, action and key; scope `admin`",
}
#: Class and meaning of the error codes that are given where the error is raised, not by its class.
GIVEN_CODES: dict[str, tuple[type[errors.UpdraftError], str]] = {
    "invalid_json": (errors.InvalidRequestError, "The body is not JSON."),
    "invalid_http": (errors.InvalidRequestError, "The request is not valid HTTP, or its length is ambiguous."),
    "too_many_headers": (errors.InvalidRequestError, "A request has more than 256 headers."),
    "previous_response_not_found": (errors.NotFoundError, "The response to continue is not stored, or not known here."),
    "files_off": (errors.NotFoundError, "The router stores no files, because the setting `files` is `none`."),
    "invalid_form": (errors.InvalidRequestError, "An upload is not `multipart/form-data`."),
    "store_off": (errors.NotFoundError, "The router stores no answers, because the setting `store` is off."),
    "invalid_value": (errors.InvalidRequestError, "A field has an invalid value; `param` names the field."),
    "unsupported_header": (
        errors.InvalidRequestError,
        "The SDK cannot use the key in a header; `param` names the header.",
    ),
    "invalid_grammar": (
        errors.InvalidRequestError,
        "A schema, regex or grammar is invalid or unsupported, or matches nothing.",
    ),
    "grammar_too_complex": (errors.InvalidRequestError, "Compiling a constraint takes too long or too much memory."),
    "template_too_expensive": (
        errors.InvalidRequestError,
        "The model's chat template takes too long or too much memory for these messages.",
    ),
    "unsupported_message": (
        errors.InvalidRequestError,
        "The model's chat template omits a message in every form; `param` names the message.",
    ),
    "grammar_failed": (errors.InvalidRequestError, "No token can continue the answer under this constraint."),
    "engine_restarting": (errors.EngineDownError, "The engine died and is restarting."),
    "other_user": (errors.PermissionDeniedError, "This server has no key and was started by another user."),
    "body_memory_exceeded": (errors.RateLimitError, "Your requests and their unread answers hold too much memory."),
    "sleeping": (errors.OverloadedError, "The node sleeps until `/wake_up`."),
    "draining": (errors.OverloadedError, "The server is shutting down."),
}
_ERRORS = """The body has OpenAI's format: `{"error": {"message", "type", "param", "code"}}`. `x-should-retry` says
whether the same request may succeed later. After the router has retried a cloud, it is `false`. `overloaded`,
`draining`, `sleeping`, `engine_down` and `engine_restarting` responses also have `retry-after`."""


def routes_page() -> str:
    return page(
        "Routes and errors",
        "## Node",
        "Nodes require the key in `UPDRAFT_NODE_API_KEY`, except for `/health`. A node without a key serves its own "
        "machine only; on Linux, its own user only. `/sleep`, `/wake_up` and `/is_sleeping` require the key in "
        "`UPDRAFT_NODE_ADMIN_KEY`, and are refused if it is not set.",
        _described(node_app(), _NODE),
        "## Gateway",
        "Routes under `/v1` require a key with the scope `inference`; `/health` and `/metrics` require no key.",
        _described(_gateway_app(), _GATEWAY),
        "## Router",
        "Routes of `updraft serve` and of the SDK.",
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
    return create_node_app(NodeEngine(engine, Tokenizer.from_folder(pocket_large_folder()), "model", 1, "hermes"))


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
    """Return a table of the routes of `app`. Raises ValueError unless `texts` describes exactly these routes."""
    routes = [(route.path.replace(":path", ""), route) for route in app.routes if isinstance(route, Route)]
    if mismatched := {path for path, _ in routes} ^ set(texts):
        raise ValueError(f"Routes and their descriptions differ: {', '.join(sorted(mismatched))}.")
    rows = [
        (code(path), method, texts[path])
        for path, route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return table(("route", "method", "meaning"), rows)


def _error_rows() -> Iterator[tuple[str, str, str, str]]:
    for error in _tree(errors.UpdraftError):
        if error.default_code:
            yield _error_row(error, error.default_code, _summary_of(error))
    for name, (error, text) in GIVEN_CODES.items():
        yield _error_row(error, name, text)


def _error_row(error: type[errors.UpdraftError], name: str, text: str) -> tuple[str, str, str, str]:
    return str(error.status), code(name), "yes" if error.retryable else "", text


def _tree(error: type[errors.UpdraftError]) -> Iterator[type[errors.UpdraftError]]:
    """Yield the subclasses in `protocol.errors` only, because other modules may not be loaded."""
    for subclass in error.__subclasses__():
        if subclass.__module__ == errors.__name__:
            yield subclass
            yield from _tree(subclass)


def _summary_of(error: type[errors.UpdraftError]) -> str:
    """Return the first paragraph of the class's own docstring. Raises ValueError if the class has no docstring."""
    own = str(error.__dict__.get("__doc__") or "")
    text = " ".join(own.partition("\n\n")[0].split())
    if not text:
        raise ValueError(f"{error.__name__} has no docstring: write one for the page of errors.")
    return text
