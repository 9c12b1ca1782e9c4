"""Translation of chat completions to Ollama's responses: one JSON object, or one JSON object per line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..errors import UpstreamError
from ..http.lenient_json import json_line, json_of, object_of, objects_of
from ..turns import as_function
from .chat_chunks import (
    ChatChunks,
    arguments_of,
    citations_of,
    first_choices,
    id_of,
    reasoning_of,
    seal,
    text_of,
    with_notes,
)
from .ollama_request import OllamaChat, OllamaGenerate

CONTENT_TYPE = "application/x-ndjson"


@dataclass(slots=True)
class OllamaAnswer:
    """Converter for one answer; measures durations from the arrival of the request."""

    request: OllamaChat | OllamaGenerate
    # Start of the request, in nanoseconds of `time.perf_counter_ns`.
    started: int = field(default_factory=time.perf_counter_ns)
    # Time of the first streamed text, in nanoseconds of `time.perf_counter_ns`; None if not streamed.
    first: int | None = None

    def part(
        self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """Build one response object with a piece of the answer. `logprobs`: the field of the chat choice."""
        thought = {"thinking": thinking} if thinking else {}
        if isinstance(self.request, OllamaGenerate):
            said: dict[str, Any] = {"response": text, **thought}
        else:
            called = {"tool_calls": calls} if calls else {}
            said = {"message": {"role": "assistant", "content": text, **thought, **called}}
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        scores = objects_of(object_of(logprobs).get("content"))
        scored = {"logprobs": scores} if scores else {}
        return {"model": self.request.model, "created_at": now, **said, **scored, "done": False}

    def delta(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Convert a streamed chunk; None if the chunk has no text. `ends` sends the tool calls at the end."""
        for choice in first_choices(chunk):
            text, thinking = _text_and_reasoning(object_of(choice.get("delta")))
            if text or thinking:
                self.first = self.first or time.perf_counter_ns()
                return self.part(text, thinking, logprobs=choice.get("logprobs"))
        return None

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Convert a whole completion. Raises UpstreamError if it is malformed."""
        message, calls, noted = _read(_as_chat(completion))
        part = self.part(*_text_and_reasoning(message), calls, completion["choices"][0].get("logprobs"))
        _sign(part, message)
        return self._ended(part, noted)

    def ends(self, completion: dict[str, Any]) -> list[dict[str, Any]]:
        """Build the last lines of a stream from its assembled `completion`. Raises UpstreamError if malformed."""
        message, calls, noted = _read(completion)
        ended = self._ended(self.part(""), noted)
        _sign(ended, message)
        return [*([self.part("", calls=calls)] if calls else []), ended]

    def loaded(self) -> dict[str, Any]:
        """Build the response to a request that only loads the model."""
        return {**self.part(""), "done": True, "done_reason": "load"}

    def _ended(self, part: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
        """Add the final fields. The time until the first text counts as prompt evaluation."""
        now, usage = time.perf_counter_ns(), object_of(completion.get("usage"))
        first = self.first or self.started
        cut = completion["choices"][0]["finish_reason"] == "length"
        ended = {
            **part,
            "done": True,
            "done_reason": "length" if cut else "stop",
            "total_duration": now - self.started,
            "load_duration": 0,
            "prompt_eval_count": usage.get("prompt_tokens") or 0,
            "prompt_eval_duration": first - self.started,
            "eval_count": usage.get("completion_tokens") or 0,
            "eval_duration": now - first,
        }
        return {**ended, "updraft": completion["updraft"]} if "updraft" in completion else ended


def _as_chat(completion: dict[str, Any]) -> dict[str, Any]:
    """Convert the choices of a text completion, or of a chunk of one, to those of a chat. Return others unchanged."""
    for choice in objects_of(completion.get("choices")):
        if isinstance(choice.get("text"), str):
            choice["delta"] = choice["message"] = {"content": choice["text"]}
    return completion


async def streamed_lines(answer: OllamaAnswer, payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer from the payloads of a chat stream. Raises UpstreamError."""
    chunks = ChatChunks()
    async for payload in payloads:
        chunk = object_of(json_of(payload, exact=True))
        if error := object_of(chunk.get("error")):
            yield error_line(str(error.get("message")))
            return
        chunks.read(_as_chat(chunk))
        if (part := answer.delta(chunk)) is not None:
            yield json_line(part)
    for part in answer.ends(chunks.whole()):
        yield json_line(part)


def embeddings_of(model: str, vectors: dict[str, Any], started: int) -> dict[str, Any]:
    """Convert an OpenAI embedding list to Ollama's response."""
    return {
        "model": model,
        "embeddings": [entry["embedding"] for entry in vectors["data"]],
        "total_duration": time.perf_counter_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": object_of(vectors.get("usage")).get("prompt_tokens") or 0,
        "updraft": vectors.get("updraft"),
    }


def pull_line(event: dict[str, Any]) -> bytes:
    """Convert a download event, which has the bytes `done` so far, the `name` of the finished model, or an `error`."""
    if "error" in event:
        return error_line(event["error"]["message"])
    if "name" in event:
        return json_line({"status": "success"})
    total = {} if event["total"] is None else {"total": event["total"]}
    return json_line({"status": event["message"] or "pulling", **total, "completed": event["done"]})


def error_line(message: str) -> bytes:
    return json_line({"error": message})


def _sign(part: dict[str, Any], message: dict[str, Any]) -> None:
    """Add the message's `OPAQUE` fields as `thinking_signature`, for callers that send messages back unchanged."""
    if "message" in part and (sealed := seal(message)):
        part["message"]["thinking_signature"] = sealed


def _text_and_reasoning(message: dict[str, Any]) -> tuple[str, str]:
    return text_of(message.get("content")) + text_of(message.get("refusal")), reasoning_of(message)


def _read(completion: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return the message, its converted tool calls, and the completion with notes on what is lost or changed. Raises
    UpstreamError if the completion has no finish reason."""
    choices = objects_of(completion.get("choices"))
    if not choices or choices[0].get("finish_reason") is None:
        raise UpstreamError("The answer ended without a finish reason.")
    message, cut = object_of(choices[0].get("message")), choices[0]["finish_reason"] == "length"
    calls, notes = list[dict[str, Any]](), list[str]()
    if cited := citations_of(message) or objects_of(message.get("annotations")):
        notes.append(f"citations were left out: {len(cited)}")
    for index, call in enumerate(objects_of(message.get("tool_calls"))):
        function = object_of(as_function(call).get("function"))
        arguments, changes = arguments_of(text_of(function.get("name")), text_of(function.get("arguments")), cut=cut)
        notes += changes
        named = {"id": identifier} if (identifier := id_of(call, "")) else {}
        calls.append({**named, "function": {"index": index, "name": function.get("name"), "arguments": arguments}})
    return message, calls, with_notes(completion, *notes)
