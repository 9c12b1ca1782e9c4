"""A chat request read for translation: every field is taken by somebody, changes nothing, or is refused by name."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ....protocol.errors import InvalidRequestError
from ...request.json_narrowing import table, tables
from .provider import Provider

#: Hints that change no answer, and what the router itself has read.
_HINTS = frozenset(
    ("prediction", "stream", "stream_options", "add_generation_prompt", "model", "metadata", "service_tier",
     "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
)  # fmt: skip
#: Values that ask for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "store": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "continue_final_message": (False,),
    "tools": ([],),
}
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a message: its bytes in base64 with their type, or its address."""

    media_type: str
    # Base64.
    data: str
    # Empty where there are bytes.
    url: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call in an earlier turn."""

    id: str
    name: str
    arguments: msgspec.Raw
    # The call as the caller sent it.
    raw: dict[str, Any]


class ChatFields:
    """The fields of one request."""

    def __init__(self, body: dict[str, Any], provider: Provider) -> None:
        self._left = {name: value for name, value in body.items() if value is not None and name not in _HINTS}
        self._provider = provider

    def take(self, *names: str) -> Any:
        """The first of these fields that is set, under any of its names."""
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def move(self, into: dict[str, Any], names: Mapping[str, str]) -> None:
        """Fields that the provider has under another name."""
        for name, theirs in names.items():
            if (value := self.take(name)) is not None:
                into[theirs] = value

    def end(self) -> None:
        """Raises UnsupportedFeatureError if a field was taken by nobody and would change the answer."""
        for name, value in self._left.items():
            if value not in _NEUTRAL.get(name, ()):
                raise self._provider.unsupported(name)

    def messages(self) -> list[dict[str, Any]]:
        return tables(self.take("messages")) or []

    def tools(self) -> list[dict[str, Any]]:
        """The functions to call. Raises UnsupportedFeatureError for tools of other kinds."""
        found: list[dict[str, Any]] = []
        for tool in tables(self.take("tools")) or []:
            function = table(tool.get("function"))
            if tool.get("type") != "function" or function is None:
                raise self._provider.unsupported(f"a tool of type {str(tool.get('type'))[:40]}")
            found.append(function)
        return found

    def tool_choice(self) -> str:
        """`auto`, `none`, `required`, or `=` with the name of a function."""
        choice = self.take("tool_choice")
        named = table((table(choice) or {}).get("function"))
        if named is not None:
            return f"={named.get('name')}"
        if choice not in (None, "auto", "none", "required"):
            raise self._provider.unsupported("tool_choice")
        return choice or "auto"

    def stop(self) -> list[str]:
        stop = self.take("stop")
        return [stop] if isinstance(stop, str) else list(stop or [])

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; an empty one for any JSON object; None for text."""
        wanted = table(self.take("response_format")) or {"type": "text"}
        if wanted.get("type") == "json_schema":
            return table((table(wanted.get("json_schema")) or {}).get("schema")) or {}
        if wanted.get("type") not in ("text", "json_object"):
            raise self._provider.unsupported("response_format")
        return {} if wanted.get("type") == "json_object" else None

    def parts(self, message: dict[str, Any]) -> list[str | Image]:
        """The texts and images of a message, without empty texts."""
        content = message.get("content")
        if content is None:
            content = message.get("refusal") or ""
        if isinstance(content, str):
            return [content] if content else []
        found: list[str | Image] = []
        for part in tables(content) or []:
            kind = part.get("type")
            if kind in ("text", "refusal"):
                found += [text] if (text := str(part.get(str(kind)) or "")) else []
            elif kind == "image_url":
                found.append(self._image(part))
            else:
                raise self._provider.unsupported(f"a part of type {str(kind)[:40]}")
        return found

    def text(self, message: dict[str, Any]) -> str:
        """Raises UnsupportedFeatureError for images, where there is no place for them."""
        parts = self.parts(message)
        if any(isinstance(part, Image) for part in parts):
            raise self._provider.unsupported(f"an image in a turn of the role {message.get('role')}")
        return "".join(str(part) for part in parts)

    def calls(self, message: dict[str, Any]) -> list[Called]:
        found: list[Called] = []
        for call in tables(message.get("tool_calls")) or []:
            function = table(call.get("function")) or {}
            arguments = function.get("arguments") or "{}"
            try:
                decoded = table(msgspec.json.decode(arguments))
            except (msgspec.DecodeError, TypeError) as error:
                raise _invalid(f"the arguments of {function.get('name')} are not JSON") from error
            if decoded is None:
                raise _invalid(f"the arguments of {function.get('name')} are no JSON object")
            raw = msgspec.Raw(str(arguments).encode())  # decoding would round its numbers
            found.append(Called(str(call.get("id")), str(function.get("name")), raw, call))
        return found

    def _image(self, part: dict[str, Any]) -> Image:
        if not self._provider.capabilities.images:
            raise self._provider.unsupported("an image")
        url = str((table(part.get("image_url")) or {}).get("url") or "")
        if url.startswith(("http://", "https://")):
            return Image("", "", url)
        match = _DATA_URL.fullmatch(url)
        if match is None:
            raise _invalid("an image is neither an http address nor a data URL with base64")
        try:
            base64.b64decode(match[2], validate=True)
        except binascii.Error as error:
            raise _invalid("the base64 of an image is broken") from error
        return Image(match[1], match[2])


def _invalid(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages: {fault}.", param="messages", code="invalid_value")
