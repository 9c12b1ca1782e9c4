"""Interface of a provider, and the builders of chat chunks. OpenAI's API needs no translation; Azure's is a variant."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ....accounting.reported_usage import counted
from ....protocol.dialects.chat_chunks import ChatChunks, order_of
from ....protocol.errors import UnsupportedFeatureError
from ....protocol.http.forwarding import NativeRequest
from ....protocol.http.lenient_json import json_bytes, json_keeping, json_of, object_in, table
from ....protocol.http.wire import new_id
from ..failures import CloudFailure, refused, reported

#: HTTP status of an error and OpenAI's code for the error, if there is one, by the provider's name of the error.
ErrorCodes = Mapping[str, tuple[int, str | None]]
#: Function that returns the chat completion chunks of an answer, or of an event of its stream; none for a keep-alive.
Translator = Callable[[dict[str, Any]], list[dict[str, Any]]]
#: Request fields that need a capability, keyed by the capability.
_NEEDED = {
    "grammars": ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"),
    "seeds": ("seed",),
    "tools": ("tools", "tool_choice", "functions", "function_call"),
    "continuation": ("continue_final_message",),
}


#: Fields of OpenAI's usage object that are known before the answer.
PROMPT_USAGE = ("prompt_tokens", "prompt_tokens_details")


def whole(value: Any) -> int:
    """Return a count or index, or 0 for an invalid value."""
    return counted(value) or 0


def arguments_of(value: Any) -> str:
    """Return a tool call's arguments as JSON text; raw JSON stays unchanged."""
    text = bytes(value) if isinstance(value, msgspec.Raw) else json_bytes(value)
    return "{}" if text == b"null" else text.decode()


def tool_call(identifier: str, name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def completion_of(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole completion. A message with a different order than its fields also has `deltas`."""
    whole, deltas = ChatChunks(), defaultdict[int, list[dict[str, Any]]](list)
    for chunk in chunks:
        whole.read(chunk)
        for choice in chunk["choices"]:
            deltas[choice["index"]].append(choice["delta"])
    completion = whole.whole()
    for choice in completion["choices"]:
        choice["message"] |= order_of(deltas[choice["index"]])
    return completion


def usage_of(read: int, written: int, cached: int, stored: int = 0, stored_1h: int = 0, **more: Any) -> dict[str, Any]:
    """Return OpenAI's usage object. `cached` and `stored`: tokens read from and written to the cache; `stored_1h`:
    tokens of `stored` that are kept for an hour."""
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    writes = {"cache_write_tokens": stored, "cache_write_1h_tokens": stored_1h}
    details = {"cached_tokens": cached, **{name: count for name, count in writes.items() if count}}
    return {**counts, "prompt_tokens_details": details, **more}


class ChunkMaker:
    """Builder of the chunks of one stream, which share ID, model and time."""

    def __init__(self) -> None:
        self.id = new_id("chatcmpl")  # used if the answer has none
        self.model = ""
        self._created = int(time.time())
        self._lengths = Counter[tuple[int, str]]()  # lengths of the messages' lists, by choice and field

    def entries(self, field: str, added: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
        """Return entries to append to a message's list, each with its index, by which clients join deltas."""
        first = self._lengths[index, field]
        self._lengths[index, field] += len(added)
        return [{"index": place, **entry} for place, entry in enumerate(added, first)]

    def delta(self, delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.id, "object": "chat.completion.chunk", "created": self._created, "model": self.model}
        return {**about, "choices": choices}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a provider's API. A request that needs a missing feature is refused, with the feature's name."""

    # Supports the field `prediction`, the draft of an answer.
    predictions: bool = False
    # Supports continuing the assistant's last message.
    continuation: bool = False
    # Supports grammars besides JSON schemas (`structured_outputs`).
    grammars: bool = False
    seeds: bool = False
    tools: bool = True
    images: bool = True
    # Lists its models at GET /models in OpenAI's form.
    lists_models: bool = True
    # Reads the `deltas` of a history's messages.
    deltas: bool = False
    # Has endpoints besides chat completions.
    all_endpoints: bool = True


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One HTTP request: path and query after the base URL, and the body."""

    path: str
    body: dict[str, Any]
    # Notes on what was changed to fit the API.
    notes: tuple[str, ...] = ()


class Provider(ABC):
    """API of a provider. One stateless instance serves all of its clouds."""

    # Name in the setting `cloud_provider`.
    name: str
    capabilities: Capabilities
    # Errors of the API. Their names are in the field `type`, `status` or `code` of an error body.
    errors: ErrorCodes = MappingProxyType({})
    # Type of the event that ends a stream, besides `[DONE]`.
    end_event = ""
    # Request fields without effect on the answer that the translation keeps. None: all are kept.
    hints: tuple[str, ...] | None = None
    # Name of the field that holds a tool call's arguments as an object. `read` does not decode it (`msgspec.Raw`).
    raw_member: str = ""

    def base_path(self, query: Mapping[str, str]) -> str:  # noqa: ARG002
        """Return the path to use if the base URL is a bare host."""
        return "/v1"

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    @abstractmethod
    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        """Translate a request for OpenAI's endpoint `path`. Raises UnsupportedFeatureError for unsupported fields."""

    def with_native(self, call: ProviderCall, body: dict[str, Any], native: NativeRequest) -> ProviderCall:  # noqa: ARG002
        """Return `call`, with the caller's own fields for all fields of the chat request `body` that are unchanged."""
        return call

    def read(self, raw: bytes) -> Any:
        """Decode the JSON of an answer or event. Raises ValueError."""
        return json_keeping(raw, self.raw_member) if self.raw_member else json_of(raw, exact=True)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer as a chat completion, by default with the translator of `events`."""
        translate = self.events()
        return body if translate is None else completion_of(translate(body))

    def events(self) -> Translator | None:
        """Return a translator of one answer, or None if answers are already completions and chunks."""
        return None

    def refused(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> CloudFailure:
        """Return the failure for a status other than 200."""
        error = table(object_in(raw).get("error"))
        if error is None or not self.errors:
            return refused(url, status, headers, raw)
        translated, _ = self._translated(error)
        return refused(url, status, headers, msgspec.json.encode({"error": translated}))

    def reported(self, url: str, error: Any) -> CloudFailure:
        """Return the failure for an error inside a stream or with status 200."""
        body = table(error)
        if body is None:
            return reported(url, error)
        translated, status = self._translated(body)
        return reported(url, translated if status is None else {**translated, "code": status})

    def _translated(self, error: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Return the error with OpenAI's code, and its HTTP status, which an error inside a stream lacks, if known."""
        names = (str(error.get(key)) for key in ("status", "type", "code"))
        status, code = next((self.errors[name] for name in names if name in self.errors), (None, None))
        return {**error, "code": code or error.get("code")}, status

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Raise UnsupportedFeatureError if the request needs a missing capability."""
        can = self.capabilities
        if path != "chat/completions" and not can.all_endpoints:
            raise UnsupportedFeatureError(f"{path}: the provider {self.name} has only chat completions.", param=path)
        for capability, names in _NEEDED.items():
            if getattr(can, capability):
                continue
            for name in names:
                if body.get(name) not in (None, False, [], "none"):
                    raise self.unsupported(name)

    def unsupported(self, name: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"{name} is not supported by the provider {self.name}. Leave it out.", param=name
        )


def with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{httpx.QueryParams(dict(query))}" if query else path


class OpenAIProvider(Provider):
    """Any OpenAI-compatible server. Requests are not checked, since the server itself refuses unsupported fields."""

    name = "openai"
    capabilities = Capabilities(predictions=True, continuation=True, grammars=True, seeds=True)

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        return ProviderCall(with_query(path, query), body)


class AzureProvider(Provider):
    """Azure OpenAI. With `api-version` in the query, each model has a path; else OpenAI's paths below `/openai/v1`."""

    name = "azure"
    capabilities = Capabilities(predictions=True, seeds=True, lists_models=False)

    def base_path(self, query: Mapping[str, str]) -> str:
        return "/openai" if "api-version" in query else "/openai/v1"

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"api-key": api_key} if api_key else {}

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        self.check(path, body)
        if "api-version" in query:
            path = f"deployments/{quote(str(body.get('model', '')), safe='')}/{path}"
        return ProviderCall(with_query(path, query), body)
