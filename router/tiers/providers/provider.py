"""The interface of a provider, and what one of OpenAI's own API does: nothing has to be translated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from ....protocol.errors import UnsupportedFeatureError
from ....protocol.http.foreign import json_keeping, json_of
from ...request.json_narrowing import table
from ..failures import CloudFailure, refused, reported

#: The fields of a chat request that need a capability.
_NEEDED = {
    "grammars": ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"),
    "seeds": ("seed",),
    "tools": ("tools", "tool_choice", "functions", "function_call"),
    "continuation": ("continue_final_message",),
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a provider's API. A request that needs another one is refused by name."""

    # It takes `prediction`, the draft of an answer.
    predictions: bool = False
    # It can continue an assistant's last message.
    continuation: bool = False
    # It takes grammars beside JSON schemas (`structured_outputs`).
    grammars: bool = False
    # It takes `seed`.
    seeds: bool = False
    # It calls tools.
    tools: bool = True
    # It reads images.
    images: bool = True
    # GET /models lists its models in OpenAI's form.
    lists_models: bool = True
    # It has other endpoints than chat completions.
    all_endpoints: bool = True


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One HTTP request: the path behind the base URL, with its query, and the body."""

    path: str
    body: dict[str, Any]


class ChatEvents(ABC):
    """Translates the events of one stream."""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a chat completion that an event becomes; none for a sign of life."""


@dataclass(frozen=True, slots=True)
class ErrorMap:
    """A provider's names of errors. A name is the `type`, `status` or `code` in the body of an error."""

    # The HTTP status of each name, for errors inside streams.
    statuses: Mapping[str, int] = field(default_factory=dict[str, int])
    # OpenAI's code for a name.
    codes: Mapping[str, str] = field(default_factory=dict[str, str])

    def translated(self, error: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The error in OpenAI's words, and the status that its name stands for."""
        names = [str(error[key]) for key in ("status", "type", "code") if error.get(key) is not None]
        status = next((self.statuses[name] for name in names if name in self.statuses), None)
        code = next((self.codes[name] for name in names if name in self.codes), error.get("code"))
        return {**error, "code": code}, status


class Provider(ABC):
    """One API. An instance serves all clouds of it and keeps no state."""

    # As the setting `cloud_provider` names it.
    name: str
    capabilities: Capabilities
    errors: ErrorMap = ErrorMap()
    # The member of a tool call that holds the arguments as an object. It is kept as `msgspec.Raw`.
    raw_member: str = ""

    def base_path(self, query: Mapping[str, str]) -> str:  # noqa: ARG002
        """The path of the base URL where the settings name a bare host."""
        return "/v1"

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    @abstractmethod
    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        """The HTTP request for OpenAI's `path` and `body`. Raises UnsupportedFeatureError for what it cannot say."""

    def read(self, raw: bytes) -> Any:
        """The JSON of an answer, or of an event. Raises ValueError."""
        return json_keeping(raw, self.raw_member) if self.raw_member else json_of(raw, exact=True)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer as a chat completion."""
        return body

    def events(self) -> ChatEvents | None:
        """The translator of a stream. None: its events are chunks already."""
        return None

    def refused(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> CloudFailure:
        """The failure behind an answer with another status than 200."""
        try:
            body = table(json_of(raw)) or {}
        except ValueError:
            body = {}
        error = table(body.get("error"))
        if error is None or not (self.errors.codes or self.errors.statuses):
            return refused(url, status, headers, raw)
        translated, _ = self.errors.translated(error)
        return refused(url, status, headers, msgspec.json.encode({"error": translated}))

    def reported(self, url: str, error: Any) -> CloudFailure:
        """The failure behind an error inside a stream, or with status 200."""
        found = table(error)
        if found is None:
            return reported(url, error)
        translated, status = self.errors.translated(found)
        return reported(url, translated if status is None else {**translated, "code": status})

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Raises UnsupportedFeatureError for what the provider says that it cannot do."""
        can = self.capabilities
        if path != "chat/completions" and not can.all_endpoints:
            raise UnsupportedFeatureError(f"{path}: the provider {self.name} has chat completions only.", param=path)
        for capability, names in _NEEDED.items():
            if getattr(can, capability):
                continue
            for name in names:
                if body.get(name) not in (None, False, [], "none"):
                    raise self.unsupported(name)

    def unsupported(self, name: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"{name}: the provider {self.name} has nothing like it. Leave it out.", param=name
        )


def with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{httpx.QueryParams(dict(query))}" if query else path
