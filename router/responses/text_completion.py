"""`/v1/completions` through the router: a bare prompt, for the cloud or for the local model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from ...protocol.decoding import read_switches
from ...protocol.errors import EngineError, InvalidRequestError, UnsupportedFeatureError, UpdraftError, WrongTypeError
from ...protocol.http import sse
from ...protocol.prompts import Prompt
from ...protocol.requests import CompletionRequest, read_completion
from ...protocol.responses import TextChoice, TextCompletion, TextLogprobs, Usage, fingerprint
from ...text.echoed_prompt import echoed_logprobs
from ...text.tokenization import TextEncoder
from ..cascade.cascade import run_concurrently
from ..cascade.escalation import CloudReply
from ..request.chat_request import check_stream_options, unsupported_on_device
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import LocalAnswer, LocalTier
from .completion import ShownTokens, prompt_logprobs, text_logprobs
from .direct import DirectCall, DirectReply
from .streaming import StreamError, relay

MAX_ANSWERS = 128  # maximum number of answers to one request on the device, for all its prompts together


async def complete(call: DirectCall) -> DirectReply:
    """Answer a text completion. Raises UpdraftError or CloudFailure."""
    request, unsupported = _device_request(call.job.body)
    ruling, escalation = await call.route(
        "completions", unsupported, "text completions are not judged: they go to the cloud if there is one"
    )
    if ruling.cloud:
        try:
            reply = await escalation.ask(call.cloud_time_left_s)
        except CloudFailure as failure:
            if not ruling.local or not failure.allows(call.state.config.fallback):
                raise
            call.record.fell_back(failure)
        else:
            if isinstance(reply, CloudReply):
                return {**reply.completion, "updraft": call.record.info()}
            return relay(call.record, reply.stream, include_usage=call.job.include_usage)
    if request is None or call.state.tiers.local is None:
        raise EngineError("The device cannot answer this completion.")
    answers = _LocalAnswers(call, request, call.state.tiers.local)
    return await answers.begun_stream() if request.stream else await answers.whole()


def _device_request(body: dict[str, Any]) -> tuple[CompletionRequest | None, InvalidRequestError | None]:
    """Return the request for the local engine, or why the engine cannot take it. Raises WrongTypeError."""
    read_switches(body, CompletionRequest)
    check_stream_options(body)
    try:
        request = read_completion({**body, "max_tokens": 1} if _wants_scores_only(body) else body)
    except WrongTypeError:
        raise
    except InvalidRequestError as error:
        return None, error
    if len(request.prompts) * request.num_answers > MAX_ANSWERS:
        return None, UnsupportedFeatureError(f"n: this device gives at most {MAX_ANSWERS} answers.", param="n")
    return request, unsupported_on_device(request)


def _wants_scores_only(body: dict[str, Any]) -> bool:
    """Return whether only the prompt's log-probabilities are wanted. The engine then generates one unsent token."""
    return body.get("max_tokens") == 0 and body["max_tokens"] is not False


class _LocalAnswers:
    """Local answers to one request: `n` per prompt, in the order of the prompts."""

    def __init__(self, call: DirectCall, request: CompletionRequest, local: LocalTier) -> None:
        self._call = call
        self._request = request
        self._local = local
        self._count = len(request.prompts) * request.num_answers
        self._created = int(time.time())
        self._wants_scores_only = _wants_scores_only(call.job.body)

    async def whole(self) -> TextCompletion:
        async def one(index: int) -> TextChoice:
            return _joined([piece async for piece in self._pieces(index)])

        completion = self._completion(await run_concurrently(self._count, one))
        completion.usage, completion.updraft = self._usage(), self._call.record.info()
        return completion

    async def begun_stream(self) -> AsyncGenerator[bytes]:
        """Return a stream of all answers in sequence. Raises a failure that occurs before the first piece."""
        pieces = (piece for index in range(self._count) async for piece in self._pieces(index))
        self._call.closing.push_async_callback(pieces.aclose)
        return self._events(await anext(pieces), pieces)

    async def _events(self, piece: TextChoice, rest: AsyncGenerator[TextChoice]) -> AsyncGenerator[bytes]:
        includes_usage = self._call.job.include_usage
        last: TextChoice | None = piece
        try:
            while last is not None:
                piece, last = last, await anext(rest, None)
                chunk = self._completion([piece])
                chunk.usage = None if includes_usage else UNSET
                chunk.updraft = UNSET if last is not None else self._call.record.info()
                yield sse.event(chunk)
        except UpdraftError as error:
            raise StreamError(error) from error
        if includes_usage:
            counted = self._completion([])
            counted.usage = self._usage()
            yield sse.event(counted)
        yield sse.DONE

    async def _pieces(self, index: int) -> AsyncGenerator[TextChoice]:
        """Yield one answer in pieces. The last piece has the finish reason."""
        request, began = self._request, time.monotonic()
        number, repetition = divmod(index, request.num_answers)
        prompt, params = request.prompts[number], request.sampling()
        if params.seed is not None:
            params = replace(params, seed=params.seed + repetition)
        ids, echo = await self._echoed(prompt)
        if echo and request.logprobs is None:
            yield TextChoice(echo, index=index)
        waits = request.echo and request.logprobs is not None  # whether the echo needs the prompt's log-probabilities
        shown = None if request.logprobs is None or self._wants_scores_only else ShownTokens(self._local)
        run = await self._local.start_text(prompt, params, constraint=request.constraint())
        sent = 0
        try:
            async for token in run:
                if waits:
                    waits = False
                    yield self._scored_echo(ids, echo, run.answer, index)
                if self._wants_scores_only:
                    continue
                sent += len(token.text)
                scored = [] if shown is None else shown.push(token)
                if token.text or scored:
                    logprobs = text_logprobs(scored, self._local.token_bytes, len(echo)) if scored else None
                    yield TextChoice(token.text, index=index, logprobs=logprobs)
            answer = run.answer
            if waits:
                yield self._scored_echo(ids, echo, answer, index)
            scored = [] if shown is None else shown.flush(answer)
            logprobs = text_logprobs(scored, self._local.token_bytes, len(echo)) if scored else None
            stop_reason = answer.stop_reason or UNSET
            text, reason = answer.text[sent:], answer.finish_reason or "stop"
            if self._wants_scores_only:
                text, reason = "", "length"
            scores = prompt_logprobs(answer, request.prompt_logprobs, self._local.token_bytes)
            yield TextChoice(text, reason, index, logprobs, stop_reason, scores)
        finally:
            self._call.record.count_local(run.answer, time.monotonic() - began)
            await run.aclose()

    async def _echoed(self, prompt: Prompt) -> tuple[Sequence[int], str]:
        """Return the tokens and the text to echo."""
        if not self._request.echo:
            return (), ""

        def read(encoder: TextEncoder) -> tuple[Sequence[int], str]:
            if isinstance(prompt, str):
                return encoder.encode_prompt(prompt), prompt
            return prompt, encoder.decode(prompt, skip_special=False)

        return await self._local.with_encoder(read)

    def _scored_echo(self, ids: Sequence[int], text: str, answer: LocalAnswer, index: int) -> TextChoice:
        if len(answer.prompt_scores) + 1 < len(ids):
            raise UnsupportedFeatureError("logprobs: this local model has none for an echoed prompt.", param="logprobs")
        scores = ((score.logprob, score.top[: self._request.logprobs]) for score in answer.prompt_scores)
        return TextChoice(text, index=index, logprobs=echoed_logprobs(ids, scores, self._local.token_bytes))

    def _usage(self) -> Usage:
        record = self._call.record
        written = 0 if self._wants_scores_only else record.local_tokens
        return Usage.of(record.local_prompt_tokens, written, cached=record.local_cached_tokens)

    def _completion(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(
            id=self._call.record.request_id,
            model=self._local.model_id,
            created=self._created,
            choices=choices,
            system_fingerprint=fingerprint(self._local.model_id),
        )


def _joined(pieces: list[TextChoice]) -> TextChoice:
    scores = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = TextLogprobs.joined(scores) if scores else None
    return msgspec.structs.replace(pieces[-1], text="".join(piece.text for piece in pieces), logprobs=logprobs)
