"""Table of all endpoints, advice on unsupported ones, and the dispatcher that daemon and SDK transports call."""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from dataclasses import replace

from ...protocol.errors import MethodNotAllowedError, NotFoundError, StorageError, UnsupportedFeatureError, UpdraftError
from ...protocol.http.wire import WireRequest, WireResponse, with_error_of
from ..responses import completion as answer
from ..router import Router
from .answers import AnswerService
from .batches.run import Background, InteractiveRequests
from .batches.service import BatchService
from .page import assets, device_models, overview, savings, tasks
from .routes import messages, ollama, openapi
from .routes.openai import batches, chat_completions, conversations, files, responses, tokens
from .routes.route import RequestContext, Route

log = logging.getLogger("updraft.router")

#: The first matching route wins, so a plain path precedes a template that also matches.
ROUTES: tuple[Route, ...] = (
    *tokens.ROUTES,
    *chat_completions.ROUTES,
    tokens.COMPLETIONS,
    *responses.ROUTES,
    *conversations.ROUTES,
    *messages.ROUTES,
    *ollama.ROUTES,
    tokens.EMBEDDINGS,
    *tokens.PASSED_ON,
    *(route for module in (files, batches, openapi) for route in module.ROUTES),
    *(route for page in (assets, overview, savings, tasks, device_models) for route in page.ROUTES),
)
_UNSUPPORTED = tuple(
    (re.compile(rf"(?:{methods}) {path}(?:/.*)?", re.DOTALL), instead)
    for methods, path, instead in (
        ("DELETE", "/v1/models", "use `updraft rm` or DELETE /updraft/models/{name} to remove a model of this "
         "device"),
        (r"\w+", "/api/(?:create|copy|push|delete|blobs)", "use `updraft rm` to remove a model of this device and "
         "/api/pull to fetch one"),
        (r"\w+", "/v1/(?:assistants|containers|evals|fine_tuning|realtime|threads|uploads|vector_stores|videos)",
         "this endpoint stores data or trains models at one provider. Call that provider directly"),
        ("POST", "/v1/images/(?:edits|variations)", "images are supported only by /v1/images/generations"),
    )
)  # fmt: skip


class Endpoints:
    """Dispatcher of requests to endpoints. The router starts when a request first needs the router."""

    def __init__(self, router: Router, routes: tuple[Route, ...] = ROUTES) -> None:
        self.router = router
        self._answers = AnswerService(router.config)
        self._interactive = InteractiveRequests()
        self._batches = BatchService(router.config, Background(self._answer, self._interactive))
        self._routes = routes

    async def start(self) -> None:
        """Start the answer store, the router and the batches now. Idempotent. Raises the errors of `Router.start`."""
        await self._answers.start()
        await self.router.start()
        await self._batches.start()

    async def close(self) -> None:
        """Stop batches and background responses, then close the router. Idempotent."""
        try:
            await self._batches.close()
            await self._answers.close()
        finally:
            await self.router.close()

    async def handle(self, request: WireRequest) -> WireResponse:
        """Answer one request. A failure becomes an error body in the route's format; only cancellation is raised."""
        work = self._answer(request)
        return await (self._interactive.counted(work) if request.method == "POST" else work)

    async def _answer(self, request: WireRequest) -> WireResponse:
        began = time.monotonic()
        try:
            response = await self._dispatch(request)
        except UpdraftError as error:
            response = answer.failure(error)
        except sqlite3.Error as error:
            log.exception("%s %s failed", request.method, request.path)
            response = answer.failure(StorageError(f"The router cannot read or write its storage: {error}."))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = answer.failure(answer.internal_error())
        spent = {"openai-processing-ms": str(int((time.monotonic() - began) * 1e3))}
        return with_error_of(replace(response, headers={**response.headers, **spent}), request.path)

    async def _dispatch(self, request: WireRequest) -> WireResponse:
        path = request.path.rstrip("/") or "/"
        other_methods: list[str] = []
        for route in self._routes:
            parameters = route.match(path)
            if parameters is not None and route.method == request.method:
                context = RequestContext(self.router, self._answers, self._batches, request, parameters, self._routes)
                return await route.handler(context)
            if parameters is not None:
                other_methods.append(route.method)
        check_supported(request.method, path)
        if other_methods:
            allowed = ", ".join(sorted(set(other_methods)))
            raise MethodNotAllowedError(f"{path} accepts {allowed}, not {request.method}.", allowed)
        known = ", ".join(dict.fromkeys(route.path.replace(":path", "") for route in self._routes))
        raise NotFoundError(f"Unknown endpoint {request.method} {path}. Known paths: {known}.")


def check_supported(method: str, path: str) -> None:
    """Raise UnsupportedFeatureError, with advice, for a known endpoint that the router does not support."""
    for pattern, instead in _UNSUPPORTED:
        if pattern.fullmatch(f"{method} {path}"):
            raise UnsupportedFeatureError(
                f"{method} {path[:100]} is not supported by this server: {instead}.", code="unsupported_endpoint"
            )
