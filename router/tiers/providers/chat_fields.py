"""Reader of a chat request for translation. Each field is translated, ignored, or refused with an error."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ....protocol.dialects.chat_chunks import arguments_of, in_order
from ....protocol.errors import invalid_value
from ....protocol.hints import EFFORTS, HINTS, Hints
from ....protocol.http.lenient_json import json_bytes, object_of, table, tables
from ....protocol.structured import function_tools
from ....protocol.turns import as_function
from .provider import Provider

#: Fields to ignore: hints that do not change the answer, and fields that the router itself handles.
_HINTS = frozenset(("prediction", "stream", "stream_options", "add_generation_prompt", "model", *HINTS)) - {
    "user",
    "safety_identifier",
}
#: Values that can be ignored, because they request the default behaviour.
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
}
BLANK = "."  # text of a turn that must not be empty
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a message: base64 data with a media type, or a URL."""

    media_type: str
    # Image bytes in base64.
    data: str
    # Image URL; empty if there is data.
    url: str = ""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A tool call in an earlier message."""

    id: str
    name: str
    arguments: msgspec.Raw
    # The call as sent by the client.
    raw: dict[str, Any]


class ChatFields:
    """Fields of one request that are still to be translated."""

    def __init__(self, body: dict[str, Any], provider: Provider) -> None:
        read = function_tools(body).items()
        self._left = {name: value for name, value in read if value is not None and name not in _HINTS}
        self._provider = provider
        # Notes on what was changed to fit the API.
        self.notes: list[str] = []

    def take(self, *names: str) -> Any:
        """Remove these fields and return the first value that is set, or None."""
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def move(self, into: dict[str, Any], names: Mapping[str, str]) -> None:
        """Move the fields `names` to `into`, under the provider's names for them."""
        for name, provider_name in names.items():
            if (value := self.take(name)) is not None:
                into[provider_name] = value

    def end(self) -> None:
        """Raise UnsupportedFeatureError if a field that was not translated would change the answer."""
        for name, value in self._left.items():
            if value not in _NEUTRAL.get(name, ()):
                raise self._provider.unsupported(name)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages. A message with `deltas` becomes one message per piece."""
        return [piece for message in tables(self.take("messages")) or [] for piece in in_order(message)]

    def tools(self) -> list[dict[str, Any]]:
        """Return the callable functions."""
        return [object_of(tool.get("function")) for tool in tables(self.take("tools")) or []]

    def effort(self) -> str | None:
        """Return the reasoning effort, whichever field sets it."""
        return Hints(**{name: self.take(name) for name in EFFORTS}).effort[0]

    def tool_choice(self) -> str:
        """Return `auto`, `none`, `required`, or `=` and the name of a function."""
        choice = self.take("tool_choice")
        named = table(object_of(choice).get("function"))
        if named is not None:
            return f"={named.get('name')}"
        if choice not in (None, "auto", "none", "required"):
            raise self._provider.unsupported("tool_choice")
        return choice or "auto"

    def stop(self) -> list[str]:
        stop = self.take("stop")
        return [stop] if isinstance(stop, str) else list(stop or [])

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, {} for any JSON object, or None for text."""
        wanted = table(self.take("response_format")) or {"type": "text"}
        if wanted.get("type") == "json_schema":
            return object_of(object_of(wanted.get("json_schema")).get("schema"))
        if wanted.get("type") not in ("text", "json_object"):
            raise self._provider.unsupported("response_format")
        return {} if wanted.get("type") == "json_object" else None

    def parts(self, message: dict[str, Any]) -> list[str | Image]:
        """Return the texts and images of a message, without empty texts."""
        return [part for part, _ in self.given_parts(message)]

    def given_parts(self, message: dict[str, Any]) -> list[tuple[str | Image, dict[str, Any]]]:
        """Return the texts and images of a message, each with the client's part, or {} if the content is a string."""
        content = message.get("content")
        if content is None:
            content = message.get("refusal") or ""
        if isinstance(content, str):
            return [(content, {})] if content else []
        parts: list[tuple[str | Image, dict[str, Any]]] = []
        for part in tables(content) or []:
            kind = part.get("type")
            if kind in ("text", "refusal"):
                parts += [(text, part)] if (text := str(part.get(str(kind)) or "")) else []
            elif kind == "image_url":
                parts.append((self._image(part), part))
            else:
                raise self._provider.unsupported(f"a content part of type {str(kind)[:40]}")
        return parts

    def text(self, message: dict[str, Any]) -> str:
        """Return the text of a message. Raises UnsupportedFeatureError if the message has images."""
        parts = self.parts(message)
        if any(isinstance(part, Image) for part in parts):
            raise self._provider.unsupported(f"an image in a message of the role {message.get('role')}")
        return "".join(str(part) for part in parts)

    def calls(self, message: dict[str, Any]) -> list[EarlierCall]:
        """Return the tool calls. Arguments that are no object become `raw_arguments`, because the APIs need objects."""
        calls: list[EarlierCall] = []
        for call in tables(message.get("tool_calls")) or []:
            function = object_of(as_function(call).get("function"))
            name, given = str(function.get("name")), function.get("arguments")
            text = given if isinstance(given, str) else json_bytes({} if given is None else given).decode()
            raw, notes = arguments_of(name, text, cut=False)  # undecoded, since decoding would round large numbers
            self.notes += notes
            calls.append(EarlierCall(str(call.get("id")), name, raw, call))
        return calls

    def _image(self, part: dict[str, Any]) -> Image:
        if not self._provider.capabilities.images:
            raise self._provider.unsupported("an image")
        url = str(object_of(part.get("image_url")).get("url") or "")
        if url.startswith(("http://", "https://")):
            return Image("", "", url)
        match = _DATA_URL.fullmatch(url)
        if match is None:
            raise invalid_value("messages", "an image is neither an http(s) URL nor a base64 data URL")
        try:
            base64.b64decode(match[2], validate=True)
        except binascii.Error as error:
            raise invalid_value("messages", "the base64 data of an image is invalid") from error
        return Image(match[1], match[2])


def add_turn(turns: list[dict[str, Any]], role: str, field: str, parts: list[dict[str, Any]]) -> None:
    """Add a turn, or extend the last turn if it has the same role. Skip an empty turn, which the APIs refuse."""
    if parts and turns and turns[-1]["role"] == role:
        turns[-1][field] += parts
    elif parts:
        turns.append({"role": role, field: parts})


def with_user_turns(
    turns: list[dict[str, Any]], blank: dict[str, Any], notes: list[str], *, user_is_last: bool
) -> list[dict[str, Any]]:
    """Add a turn with the content `blank` if the user's first or last turn is missing because it was blank."""
    turn = {"role": "user", **blank}
    before = [] if turns and turns[0]["role"] == "user" else [turn]
    after = [turn] if turns and user_is_last and turns[-1]["role"] != "user" else []
    if before or after:
        notes.append(f"messages: a blank message of the user was sent as {BLANK!r}")
    return [*before, *turns, *after]
