"""Cloud-only endpoints, whose requests and answers are passed on unchanged."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...protocol.decoding import read_object
from ...protocol.dialects.forms import FORM, read_upload
from ...protocol.errors import InvalidRequestError
from ...protocol.http.foreign import json_of
from ...protocol.http.wire import WireRequest
from ...protocol.safety.names import check_names
from ..cascade.cloud_call import cloud_call, traced
from ..request.json_narrowing import table
from ..tiers.cloud import json_content
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import CloudUsage, Content
from .direct import CloudsOwnError, DirectCall, DirectHandler, DirectReply
from .streaming import StreamError


def read_any_model(request: WireRequest) -> tuple[dict[str, Any], str]:
    """Return a JSON object and its model, by default `auto`; for a form, only its model. Raises
    InvalidRequestError.
    """
    kind = request.headers.get("content-type", "")
    if kind.startswith(FORM):
        model = read_upload(kind, request.body).model
        return {"model": model, "file": {"of": "a form"}}, model  # content that no privacy rule can read
    body = read_object(request.body)
    check_names(body)
    named: Any = body.get("model", "auto")
    if not isinstance(named, str):
        raise InvalidRequestError("model must be a string.", param="model", code="invalid_value")
    return body, named


def passed_on(path: str, what: str) -> DirectHandler:
    """Return the handler of `path`, below the cloud's base URL. `what`: plural name of the results."""

    async def handle(call: DirectCall) -> DirectReply:
        none_here = CloudsOwnError(f"This device does not provide {what}: they come from a cloud.", param="model")
        _, escalation = await call.route(path, none_here, f"{what} come from the cloud")
        [cloud] = escalation.candidates()[-1:]
        content = _content(call, cloud.model)
        async with cloud_call(call.state, call.record, {**call.job.body, "model": cloud.model}, path) as attempt:
            answer = await cloud.tier.pass_on(
                path, content, timeout_s=call.cloud_time_left_s(), forwarded=traced(call.job.forwarded, attempt.span)
            )
        call.record.route = "cloud"
        if not isinstance(answer.body, bytes):
            call.closing.push_async_callback(answer.body.aclose)
            return _events(answer.body)
        if answer.kind.startswith("application/json"):
            call.record.counted(_usage(answer.body))
        return answer

    return handle


def _content(call: DirectCall, model: str) -> Content:
    """Return the body as received, with the cloud's name for the model."""
    sent = call.request
    kind = sent.headers.get("content-type", "")
    if not kind.startswith(FORM):
        named = {"model": model} if "model" in call.job.body else {}
        return json_content({**call.job.body, **named})
    place = read_upload(kind, sent.body).place
    return Content(sent.body[: place.start] + model.encode() + sent.body[place.stop :], kind, model)


def _usage(raw: bytes) -> CloudUsage | None:
    try:
        return CloudUsage.of(table(json_of(raw)) or {})
    except ValueError:
        return None


async def _events(body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for chunk in body:
            yield chunk
    except CloudFailure as failure:
        raise StreamError(failure.error) from failure
