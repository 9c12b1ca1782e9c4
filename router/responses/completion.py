"""OpenAI completions and chunks, with the `updraft` object that explains the routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...protocol.errors import UpdraftError
from ...protocol.http import sse
from ...protocol.http.lenient_json import object_of, rows, tables
from ...protocol.http.wire import WireResponse
from ...protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatTokenLogprob,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    PromptToken,
    TextLogprobs,
    UpdraftInfo,
    Usage,
    fingerprint,
)
from ...text.detokenize import IncrementalDetokenizer
from ...text.templates.reasoning import ReasoningSplitter
from ..accounting.request_record import RequestRecord
from ..cascade.cascade import Cascade
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import LocalAnswer, LocalTier, Token

TokenBytes = Callable[[int], bytes]


def local_completion(answers: Sequence[LocalAnswer], cascade: Cascade, info: UpdraftInfo) -> ChatCompletion:
    """Return the completion of all answers to one request, which share a prompt."""
    record, local, first = cascade.record, cascade.local, answers[0]
    return ChatCompletion(
        id=record.request_id,
        model=local.model_id,
        system_fingerprint=fingerprint(local.model_id),
        choices=[_choice(answer, index, cascade) for index, answer in enumerate(answers)],
        usage=first.usage(sum(len(answer.tokens) for answer in answers[1:])),
        sampling=first.sampling or UNSET,
        prompt_logprobs=prompt_logprobs(first, cascade.chat.prompt_logprobs, local.token_bytes),
        updraft=info,
    )


def _choice(answer: LocalAnswer, index: int, cascade: Cascade) -> ChatChoice:
    local, logprobs = cascade.local, None
    if cascade.chat.logprobs:
        shown = ShownTokens(local)
        tokens = [other for token in answer.tokens for other in shown.push(token)]
        logprobs = token_logprobs([*tokens, *shown.flush(answer)], local.token_bytes)
    message, reason = AssistantMessage(content=answer.text), answer.finish_reason
    if (reader := cascade.reader()) is not None:
        message, reason = reader.whole(answer.text, reason or "stop")
    return ChatChoice(message, reason or "stop", index, logprobs, answer.stop_reason or UNSET)


def prompt_logprobs(
    answer: LocalAnswer, shown: int | None, token_bytes: TokenBytes
) -> list[dict[str, PromptToken] | None] | UnsetType:
    """Return the log-probabilities of each prompt token and of the likeliest tokens in its place, in vLLM's form."""
    if shown is None:
        return UNSET
    entries: list[dict[str, PromptToken] | None] = [None]
    for score in answer.prompt_scores:
        top = ((*each, rank) for rank, each in enumerate(score.top[:shown], 1))
        ranked = [(score.id, score.logprob, score.rank), *top]
        entries.append(  # an incomplete UTF-8 character in a token becomes a replacement character
            {
                str(token): PromptToken(logprob, rank, token_bytes(token).decode(errors="replace"))
                for token, logprob, rank in ranked
            }
        )
    return entries


def headers(info: UpdraftInfo, *, begun: bool = False) -> dict[str, str]:
    """Return the `x-updraft-*` and `x-request-id` headers. `begun`: a stream begins, so that costs are unknown."""
    values = {"x-request-id": info.request_id, **info.headers()}
    if begun:
        for name in ("x-updraft-cost-usd", "x-updraft-saved-usd"):
            values.pop(name, None)
    return values


def internal_error() -> UpdraftError:
    """Return the error to send to the caller after an unexpected exception."""
    return UpdraftError("The router failed on this request. See the router's log for the cause.", code="internal_error")


def failure(error: UpdraftError | CloudFailure, record: RequestRecord | None = None) -> WireResponse:
    """Return an error in OpenAI's format. If the device has read the prompt, a header asks clients not to retry."""
    typed = error.error if isinstance(error, CloudFailure) else error
    values = {"content-type": "application/json", **typed.headers()}
    if record is not None:
        values |= {"x-request-id": record.request_id, **record.rate_limits}
        if record.local_tokens or record.local_prompt_tokens:
            values["x-should-retry"] = "false"
    return WireResponse(typed.status, values, msgspec.json.encode(typed.to_body()))


def notes_in(answer: dict[str, Any]) -> tuple[str, ...]:
    """Return the notes that an Updraft cloud node put into its answer, or into the last chunk of its stream."""
    notes = rows(object_of(answer.get("updraft")).get("notes")) or ()
    return tuple(note for note in notes if isinstance(note, str))


class ShownTokens:
    """Buffer that releases tokens once their text is sent to the caller. Tokens of a stop string are not released."""

    def __init__(self, local: LocalTier) -> None:
        self._detokenizer = IncrementalDetokenizer(lambda token: local.token_bytes(token, skip_special=True))
        self._held: list[tuple[int, Token]] = []  # buffered tokens, each with the position of its text
        self._written = 0  # characters generated, including a stop string
        self._shown = 0

    def push(self, token: Token) -> list[tuple[int, Token]]:
        """Add a token. Return the tokens that this releases, with the positions of their text in the answer."""
        self._held.append((self._written, token))
        self._written += len(self._detokenizer.push(token.id))
        self._shown += len(token.text)
        return self._released()

    def flush(self, answer: LocalAnswer) -> list[tuple[int, Token]]:
        """Return the tokens that the end of the answer releases: all, unless a stop string ended the answer."""
        self._written += len(self._detokenizer.flush())
        self._shown = max(self._shown, len(answer.text))
        if self._shown >= self._written:
            self._shown = self._written + 1  # + 1 also releases tokens without text
        return self._released()

    def _released(self) -> list[tuple[int, Token]]:
        released = [held for held in self._held if held[0] < self._shown]
        self._held = self._held[len(released) :]
        return released


def token_logprobs(shown: Sequence[tuple[int, Token]], token_bytes: TokenBytes) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        [ChatTokenLogprob.of(token.id, token.signals.logprob, token.top, token_bytes) for _, token in shown]
    )


def text_logprobs(shown: Sequence[tuple[int, Token]], token_bytes: TokenBytes, echoed: int) -> TextLogprobs:
    """Return the log-probabilities in the form of `/v1/completions`. `echoed`: length of the echoed prompt."""
    return TextLogprobs.of(token_logprobs(shown, token_bytes).content, [echoed + start for start, _ in shown])


class ChunkWriter:
    """Writer of one stream's chunks. If the caller asked for the usage, all chunks before it have `usage: null`."""

    def __init__(self, cascade: Cascade) -> None:
        self.index = 0  # index of the answer that is being written
        self._record = cascade.record
        self._include_usage = cascade.job.include_usage
        self._model = cascade.local.model_id
        self._created = int(time.time())

    def role(self) -> bytes:
        return self._chunk([ChunkChoice(Delta(role="assistant", content=""), index=self.index)])

    def delta(self, delta: Delta, logprobs: ChoiceLogprobs | None = None) -> bytes:
        return self._chunk([ChunkChoice(delta, index=self.index, logprobs=logprobs)])

    def finish(self, reason: FinishReason, usage: Usage, answer: LocalAnswer) -> bytes:
        """Return the last events: a chunk with the finish reason, the usage if requested, and the end mark."""
        last = self.end(reason, answer, updraft=self._record.info(), sampling=answer.sampling or UNSET)
        counted = self._chunk([], usage=usage) if self._include_usage else b""
        return last + counted + sse.DONE

    def end(self, reason: FinishReason, answer: LocalAnswer, **more: Any) -> bytes:
        """Return the chunk with the finish reason, without the stream's end mark, since other answers may follow."""
        stop_reason = answer.stop_reason or UNSET
        return self._chunk([ChunkChoice(Delta(), reason, self.index, stop_reason=stop_reason)], **more)

    def adopt(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return a cloud's chunk with the ID, model and time of this stream, without the role that was sent before."""
        for choice in event["choices"]:
            object_of(choice.get("delta")).pop("role", None)
        return {**event, "id": self._record.request_id, "model": self._model, "created": self._created}

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> bytes:
        about = {"model": self._model, "system_fingerprint": fingerprint(self._model), "created": self._created}
        fields: dict[str, Any] = {"usage": None if self._include_usage else UNSET, **about, **more}
        return sse.event(ChatCompletionChunk(id=self._record.request_id, choices=choices, **fields))


def without_reasoning_tags(completion: dict[str, Any]) -> dict[str, Any]:
    """Convert the reasoning in a whole completion. Drops `deltas`, which would still hold the tags."""
    choices: list[dict[str, Any]] = []
    for choice in tables(completion.get("choices")) or []:
        message = {name: value for name, value in object_of(choice.get("message")).items() if name != "deltas"}
        choices.append({**choice, "message": _converted(message, ReasoningSplitter(), ended=True)})
    return {**completion, "choices": choices}


class CloudReasoning:
    """Converter of `<think>` text in one stream's events. Reasoning in `reasoning_content` stays unchanged."""

    def __init__(self) -> None:
        self._splitters: dict[Any, ReasoningSplitter] = {}

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "choices": [self._choice(each) for each in tables(event.get("choices")) or []]}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        splitter = self._splitters.setdefault(choice.get("index"), ReasoningSplitter())
        delta = object_of(choice.get("delta"))
        return {**choice, "delta": _converted(delta, splitter, ended=bool(choice.get("finish_reason")))}


def _converted(said: dict[str, Any], splitter: ReasoningSplitter, *, ended: bool) -> dict[str, Any]:
    """Return a message or delta with its reasoning in `reasoning_content`. `ended`: no more text follows."""
    text = said.get("content")
    thoughts, shown = splitter.push(text) if isinstance(text, str) else ("", "")
    if ended:
        rest = splitter.flush()
        thoughts, shown = thoughts + rest[0], shown + rest[1]
    content = {"content": shown} if shown or isinstance(text, str) else {}
    return {**said, **content, **({"reasoning_content": thoughts} if thoughts else {})}
