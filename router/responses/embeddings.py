"""`/v1/embeddings` through the router: from the cloud if there is one, else from the device."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from ...accounting.reported_usage import ReportedUsage
from ...protocol.embeddings import embedding_list, read_embedding
from ...protocol.errors import EngineError, InvalidRequestError, WrongTypeError
from ...protocol.prompts import Prompt
from ...protocol.responses import MAX_TOKENS
from ...protocol.sampling import SamplingParams
from ...text.tokenization import TextEncoder
from ..accounting.request_record import RequestRecord
from ..cascade.cascade import run_concurrently
from ..cascade.cloud_call import cloud_call
from ..tiers.interfaces import LocalTier
from .direct import CloudOnlyError, DirectCall, DirectReply

#: Generate one token, so that the engine reads the whole input. The token itself is not used.
_READ = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


async def embed(call: DirectCall, truncate: bool | None = False) -> DirectReply:
    """Answer an embeddings request. Raises UpdraftError or CloudFailure. `truncate`: whether the device cuts inputs to
    its context length. None: like True, but without a note if a cloud answers, which gets the inputs whole."""
    body, record = call.job.body, call.record
    ruling, escalation = await call.route("embeddings", _why_not_on_device(call), "embeddings come from the cloud")
    if not ruling.cloud:
        record.route = "local"
        return await _on_the_device(call, truncate=truncate is not False)
    [cloud] = escalation.candidates()[-1:]
    body = {**body, "model": cloud.model}
    async with cloud_call(call.state, record, body, "embeddings") as attempt:
        forwarded = attempt.forwarded(call.job.forwarded)
        answer = await cloud.tier.embed(body, timeout_s=call.cloud_time_left_s(), forwarded=forwarded)
    record.route = "cloud"
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
    return (hidden / max(float(np.linalg.norm(hidden)), 1e-12)).tolist()
