"""Requests to endpoints without gates: rules alone choose the tier. Embeddings, and requests forwarded unchanged."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...accounting.reported_usage import ReportedUsage
from ...protocol.decoding import read_object
from ...protocol.dialects.multipart import FORM, read_upload
from ...protocol.embeddings import embedding_list, read_embedding
from ...protocol.errors import EngineError, InvalidRequestError, UnsupportedFeatureError, WrongTypeError
from ...protocol.http.forwarding import forwarded
from ...protocol.http.lenient_json import object_in
from ...protocol.http.wire import WireRequest
from ...protocol.prompts import Prompt
from ...protocol.responses import MAX_TOKENS
from ...protocol.sampling import SamplingParams
from ...text.tokenization import TextEncoder
from ..accounting.request_record import RequestRecord
from ..cascade.cascade import run_concurrently
from ..cascade.cloud_call import cloud_call
from ..cascade.escalation import Escalation
from ..gates.gates import GateDecision
from ..gates.rules import Ruling
from ..request.chat_request import (
    RequestedTier,
    RoutingRequest,
    check_fields,
    check_private,
    take_options,
    take_unknown_hints,
)
from ..state import RouterState
from ..tiers.cloud import json_content
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import CloudContent, Content, LocalTier
from .streaming import StreamError

#: Reply to send: JSON (a dict or a struct), server-sent events, or a cloud's unparsed response.
DirectReply = object | AsyncGenerator[bytes] | CloudContent
DirectHandler = Callable[["DirectCall"], Awaitable[DirectReply]]
#: Generate one token, so that the engine reads the whole input. The token itself is not used.
_READ = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class CloudOnlyError(UnsupportedFeatureError):
    """The error for a request that only a cloud can answer."""


@dataclass(slots=True)
class DirectCall:
    """One request with its resources. Call `aclose()` when the answer is delivered or dropped."""

    request: WireRequest
    job: RoutingRequest
    state: RouterState
    record: RequestRecord
    # Resources to close at the end.
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def route(
        self, path: str, unsupported: InvalidRequestError | None, why_cloud: str
    ) -> tuple[Ruling, Escalation]:
        """Return the tiers that may answer, and the escalation to the cloud. `unsupported`: why the device cannot
        answer. `why_cloud`: reason to report if both tiers may answer, or if only a cloud has the feature. Raises the
        errors of `rule`."""
        self.job = replace(self.job, unsupported=unsupported)
        escalation = Escalation(self.job, self.state, self.record, path)
        self.closing.push_async_callback(escalation.aclose)
        ruling = await escalation.ruling()
        open_ended = ruling.open or (ruling.cloud and isinstance(unsupported, CloudOnlyError))
        self.record.decide(GateDecision(0, escalate=ruling.cloud, reason=why_cloud if open_ended else ruling.reason))
        self.record.route = "cloud" if ruling.cloud else "local"
        return ruling, escalation

    def cloud_time_left_s(self) -> float:
        return max(0.001, min(self.state.config.cloud_timeout_s, self.job.remaining_s))

    async def aclose(self) -> None:
        await self.closing.aclose()


def direct_job(
    request: WireRequest, body: dict[str, Any], requested_tier: RequestedTier, record: RequestRecord
) -> RoutingRequest:
    """Return the request in the form that the rules read. Raises InvalidRequestError for options of the gates."""
    options = take_options(body)
    check_private(options, requested_tier, request.mark)
    for name in ("quality", "confidence", "hold_tokens"):
        if getattr(options, name) is not None:
            raise UnsupportedFeatureError(
                f"updraft.{name} is only for /v1/chat/completions: no gate judges this endpoint. Leave it out.",
                param=f"updraft.{name}",
            )
    selected = forwarded(request.headers, request.query, request.cloud_key, request.retries)
    record.hints = (*request.hints, *selected.notes, *take_unknown_hints(body))
    return RoutingRequest(
        requested_tier=requested_tier,
        body=body,
        private=options.private or request.mark.is_private,
        deadline=None if request.timeout_s is None else record.started + request.timeout_s,
        forwarded=selected,
    )


def read_any_model(request: WireRequest) -> tuple[dict[str, Any], str]:
    """Return the JSON body (or a placeholder for a form) and its model (default `auto`). Raises InvalidRequestError."""
    kind = request.headers.get("content-type", "")
    if kind.startswith(FORM):
        model = read_upload(kind, request.body).model
        return {"model": model, "file": {"of": "a form"}}, model  # a placeholder that privacy rules treat as unreadable
    body = read_object(request.body)
    check_fields(body)
    named: Any = body.get("model", "auto")
    if not isinstance(named, str):
        raise InvalidRequestError("model must be a string.", param="model", code="invalid_value")
    return body, named


def forwarder(path: str, what: str) -> DirectHandler:
    """Return a handler that forwards requests to the cloud endpoint `path`. `what`: noun for the results in errors."""

    async def handle(call: DirectCall) -> DirectReply:
        none_here = CloudOnlyError(f"This device cannot create {what}: a cloud is needed.", param="model")
        _, escalation = await call.route(path, none_here, f"{what} come from the cloud")
        [cloud] = escalation.candidates()[-1:]
        content = _content(call, cloud.model)
        async with cloud_call(call.state, call.record, {**call.job.body, "model": cloud.model}, path) as attempt:
            answer = await cloud.tier.pass_on(
                path, content, timeout_s=call.cloud_time_left_s(), forwarded=attempt.forwarded(call.job.forwarded)
            )
        if not isinstance(answer.body, bytes):
            call.closing.push_async_callback(answer.body.aclose)
            return _events(answer.body)
        if answer.kind.startswith("application/json"):
            call.record.counted(ReportedUsage.of(object_in(answer.body), MAX_TOKENS))
        return answer

    return handle


def _content(call: DirectCall, model: str) -> Content:
    """Return the received body with the model name replaced by `model`."""
    sent = call.request
    kind = sent.headers.get("content-type", "")
    if not kind.startswith(FORM):
        named = {"model": model} if "model" in call.job.body else {}
        return json_content({**call.job.body, **named})
    upload = read_upload(kind, sent.body)
    before, after = sent.body[: upload.place.start], sent.body[upload.place.stop :]
    return Content(before + model.encode() + after, upload.content_type, model)


async def _events(body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for chunk in body:
            yield chunk
    except CloudFailure as failure:
        raise StreamError(failure.error) from failure


async def embed(call: DirectCall, truncate: bool | None = False) -> DirectReply:
    """Answer an embeddings request. Raises UpdraftError or CloudFailure. `truncate`: whether the device cuts inputs to
    its context length. None: like True, but without a note if a cloud answers, which gets the inputs whole."""
    body, record = call.job.body, call.record
    ruling, escalation = await call.route("embeddings", _why_not_on_device(call), "embeddings come from the cloud")
    if not ruling.cloud:
        return await _on_the_device(call, truncate=truncate is not False)
    [cloud] = escalation.candidates()[-1:]
    body = {**body, "model": cloud.model}
    async with cloud_call(call.state, record, body, "embeddings") as attempt:
        forwarded = attempt.forwarded(call.job.forwarded)
        answer = await cloud.tier.embed(body, timeout_s=call.cloud_time_left_s(), forwarded=forwarded)
    record.counted(ReportedUsage.of(answer, MAX_TOKENS))
    record.notes = ("truncate: no effect",) if truncate else ()
    return {**answer, "updraft": record.info()}


def _why_not_on_device(call: DirectCall) -> InvalidRequestError | None:
    """Return why the device may not answer, or None. With `auto`, all vectors come from the cloud if there is one."""
    try:
        read_embedding(call.job.body)
    except WrongTypeError:
        raise
    except InvalidRequestError as error:
        return error
    availability = call.state.availability()
    if call.job.requested_tier == "auto" and availability.cloud_missing is None and not availability.offline:
        return CloudOnlyError(
            "embeddings of model='auto' come from the cloud, and vectors of two models are not comparable: use "
            "model='local' for all of them.",
            param="model",
        )
    return None


async def _on_the_device(call: DirectCall, *, truncate: bool) -> dict[str, Any]:
    """Return the normalized hidden state of each input's last token."""
    request, local = read_embedding(call.job.body), call.state.tiers.local
    if local is None:
        raise EngineError("The router has no local tier.")
    inputs = request.inputs
    if truncate:
        inputs = await local.with_encoder(lambda encoder: _cut(encoder, inputs, local.context_length - 1, call.record))
    vectors = await run_concurrently(len(inputs), lambda index: _vector(call, local, inputs[index]))
    request.model = local.model_id
    answer = embedding_list(request, vectors, call.record.local_prompt_tokens)
    return {**msgspec.structs.asdict(answer), "updraft": call.record.info()}


def _cut(encoder: TextEncoder, inputs: list[Prompt], most: int, record: RequestRecord) -> list[Prompt]:
    """Cut each input to `most` tokens, and add a note."""
    tokens = [encoder.encode_prompt(each) if isinstance(each, str) else each for each in inputs]
    record.notes = tuple(f"input[{at}]: cut to {most} tokens" for at, each in enumerate(tokens) if len(each) > most)
    return [each[:most] for each in tokens]


async def _vector(call: DirectCall, local: LocalTier, prompt: Prompt) -> list[float]:
    began, run = time.monotonic(), await local.start_text(prompt, _READ)
    try:
        await anext(run)
    finally:
        call.record.count_local(run.answer, time.monotonic() - began)
        await run.aclose()
    hidden = run.answer.prompt_hidden
    if hidden is None:
        raise EngineError("The engine returned no hidden state.")
    return (hidden / max(float(hidden @ hidden) ** 0.5, 1e-12)).tolist()
