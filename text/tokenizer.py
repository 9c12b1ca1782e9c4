"""Tokenizer of a model folder: Hugging Face's `tokenizers` with two additional guarantees.

User text never produces special tokens, and every token has exact bytes, so that streaming only has to decode UTF-8.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import tokenizers

from ..protocol.errors import ContextLengthError, ModelLoadError
from ..protocol.requests import Message
from ..protocol.structured import RenderOptions
from ..protocol.unicode_forms import read_text
from .chat import ChatPrompt, ChatTemplate, encoding_runs, special_pattern
from .control_tokens import unflagged_control_tokens
from .detokenize import gpt2_byte_alphabet
from .templates.sources import TemplateSources

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONG = 2**13  # minimum characters of a long text; encoding a shorter text takes at most a few milliseconds
_log = logging.getLogger("updraft.text")


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """Special tokens around a prompt, from tokenizer_config.json. If an `add_*` is None, tokenizer.json decides."""

    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool | None = None
    add_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The tokenizer of a model, as its files describe it."""

    name: str
    # Content of a tokenizer.json.
    definition: str
    ends: PromptEnds
    eos_ids: frozenset[int]
    # Chat templates. None: the files have none.
    templates: TemplateSources | None


class Tokenizer:
    """Thread-safe tokenizer. `eos_ids` end an answer; `vocab_size`: highest id + 1; `special_ids`: control tokens."""

    def __init__(
        self,
        definition: str,
        *,
        eos_ids: Iterable[int],
        chat_template: ChatTemplate | None = None,
        ends: PromptEnds = PromptEnds(),
    ) -> None:
        """`definition` is the content of a tokenizer.json. Raises ModelLoadError if unusable."""
        parsed = _parsed(definition)
        sources = () if chat_template is None else (chat_template.source, chat_template.tool_source)
        marks = set(unflagged_control_tokens(_added(parsed, special=False), *sources))
        try:
            self._special_mode = tokenizers.Tokenizer.from_str(definition)
            self._plain_mode = tokenizers.Tokenizer.from_str(_with_special(parsed, marks) if marks else definition)
        except Exception as error:  # the library raises no more specific type
            raise ModelLoadError(f"The tokenizer definition is unusable: {error}") from error
        for mode in (self._special_mode, self._plain_mode):  # truncation and padding in the file are for training
            mode.no_truncation()
            mode.no_padding()
        self._plain_mode.encode_special_tokens = True
        self._token_bytes = _byte_decoder(parsed)
        added = self._special_mode.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = special_pattern([*marks, *(added[token_id].content for token_id in self.special_ids)])
        self.vocab_size = max(self.vocabulary().values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self._ends = ends
        self._bos_id, self._eos_id = map(self._plain_mode.token_to_id, (ends.bos_token, ends.eos_token))
        self._longest_chat: int | None = None  # maximum size of a rendered chat, in bytes
        self._front: list[int] = []  # tokens at the start of every chat
        if self._bos_id is not None and self.encode_prompt("")[:1] == [self._bos_id]:
            self._front = [self._bos_id]

    @classmethod
    def from_folder(
        cls, folder: Path, *, chat_template: str | None = None, tool_call_parser: str = "auto"
    ) -> Tokenizer:
        """Read `tokenizer.json` and, if present, `tokenizer_config.json`, `generation_config.json` and templates.

        `chat_template` replaces the model's (see `TemplateSources.of`). Raises ModelLoadError naming a missing or
        corrupt file, ConfigurationError if the template cannot be read.
        """
        return cls.from_parts(_folder_parts(folder), chat_template, tool_call_parser)

    @classmethod
    def from_parts(
        cls, parts: TokenizerParts, chat_template: str | None = None, tool_call_parser: str = "auto"
    ) -> Tokenizer:
        """Create the tokenizer of a model, whatever files it comes from. The options and errors of `from_folder`."""
        parsed, ends = _parsed(parts.definition, f"The tokenizer of {parts.name}"), parts.ends
        special = _added(parsed, special=True)
        eos_ids = {*parts.eos_ids, *([special[ends.eos_token]] if ends.eos_token in special else [])}
        tokens = special | _added(parsed, special=False)
        sources = TemplateSources.of(parts.name, parts.templates, chat_template, tokens)
        if tool_call_parser != "auto":
            sources = replace(sources, tool_style=tool_call_parser)
        marks = unflagged_control_tokens(_added(parsed, special=False), sources.default, sources.tool_use)
        all_special = [*special, *marks]
        template = ChatTemplate(sources, bos_token=ends.bos_token, eos_token=ends.eos_token, special_tokens=all_special)
        return cls(parts.definition, eos_ids=eos_ids, chat_template=template, ends=ends)

    def limit(self, context_length: int) -> int:
        """Make `encode_chat` refuse chats that cannot fit `context_length` tokens; return the size limit in bytes."""
        self._longest_chat = context_length * max(len(self.token_bytes(token)) for token in range(self.vocab_size))
        return self._longest_chat

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encode `text` without adding tokens. Special tokens in the text are recognized only if allowed."""
        return _ids(self._special_mode if allow_special else self._plain_mode, text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a raw prompt, adding the special tokens that the model expects around it (usually BOS)."""
        ids = _ids(self._plain_mode, text, add_special_tokens=True)
        # BOS and EOS can only come from tokenizer.json, because the plain mode never finds special tokens in the text.
        begun, ended = ids[:1] == [self._bos_id], ids[-1:] == [self._eos_id]
        wants_bos, wants_eos = self._ends.add_bos, self._ends.add_eos
        if wants_bos is not None and wants_bos != begun and self._bos_id is not None:
            ids = [self._bos_id, *ids] if wants_bos else ids[1:]
        if wants_eos is not None and wants_eos != ended and self._eos_id is not None:
            ids = [*ids, self._eos_id] if wants_eos else ids[:-1]
        return ids

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]:
        """Return the ids of `chat_prompt`. Raises its errors."""
        return self.chat_prompt(messages, **options).ids

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> ChatPrompt:
        """Encode a chat; special tokens only come from the template, never from a message.

        Prepends BOS if the model expects it and the template does not write it. Raises ModelLoadError if the chat
        template is missing or invalid, InvalidRequestError if the template refuses the messages, ContextLengthError
        above the size of `limit`.
        """
        if self.chat_template is None:
            raise ModelLoadError("This model has no chat template: give one with --chat-template.")
        segments, reasoning = self.chat_template.rendered(messages, **options)
        runs = encoding_runs(segments, self._special)
        if self._longest_chat is not None and (length := sum(len(run.text) for run in runs)) > self._longest_chat:
            raise ContextLengthError(
                f"The messages have {length} characters; this model's context holds at most {self._longest_chat}.",
                param="messages",
            )
        ids = [token_id for run in runs for token_id in self.encode(run.text, allow_special=run.is_control)]
        return ChatPrompt(ids if ids[:1] == self._front else self._front + ids, reasoning)

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, by the token's text in the tokenizer's notation."""
        return self._plain_mode.get_vocab(with_added_tokens=True)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token `text`; None if there is no such special token."""
        token_id = self._plain_mode.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode `ids`; bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in ids)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of a token; empty for unused ids, and for special tokens unless `skip_special` is False."""
        if skip_special and token_id in self.special_ids:
            return b""
        token = self._plain_mode.id_to_token(token_id)
        return b"" if token is None else self._token_bytes(token)


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode a text. Long texts use the batch call, since `encode` holds the GIL for about a second per megabyte."""
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _byte_decoder(definition: dict[str, Any]) -> Any:
    """Return a function from a vocabulary entry to its bytes, for the byte-level or byte-fallback `decoder`."""
    decoder: dict[str, Any] | None = definition.get("decoder")
    kinds = [step["type"] for step in (decoder or {}).get("decoders", [decoder] if decoder else [])]
    if "ByteLevel" in kinds:
        if definition.get("pre_tokenizer") is None:
            _log.warning(
                "The tokenizer has no pre_tokenizer: text is split differently than in training, and answers may be "
                "poor. Download the model again with its original tokenizer.json."
            )
        alphabet = gpt2_byte_alphabet()

        def byte_level(token: str) -> bytes:
            values = [alphabet.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)

        return byte_level
    if "ByteFallback" in kinds:

        def byte_fallback(token: str) -> bytes:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()

        return byte_fallback
    raise ModelLoadError(
        f"The tokenizer's decoder {kinds or 'is missing and'} is not supported: byte-level BPE or byte-fallback needed."
    )


def _folder_parts(folder: Path) -> TokenizerParts:
    definition = _read(folder / "tokenizer.json")
    _parsed(definition, str(folder / "tokenizer.json"))
    config = _read_json(folder / "tokenizer_config.json")
    eos_token, bos_token = _token_text(config.get("eos_token")), _token_text(config.get("bos_token"))
    ends = PromptEnds(bos_token, eos_token, config.get("add_bos_token"), config.get("add_eos_token"))
    eos_ids = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    return TokenizerParts(folder.name, definition, ends, frozenset(eos_ids), _templates(folder, config))


def _templates(folder: Path, config: dict[str, Any]) -> TemplateSources | None:
    """Read the chat templates in the folder, with the same precedence as transformers."""
    named = _named(config.get("chat_template")) | _named(_read_json(folder / "chat_template.json").get("chat_template"))
    more = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (own_file := folder / "chat_template.jinja").exists():
        more["default"] = own_file
    return TemplateSources.named(named | {name: _read(path) for name, path in more.items()})


def _named(templates: str | list[dict[str, str]] | None) -> dict[str, str]:
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {"default": templates} if templates else {}


def _parsed(definition: str, name: str = "The tokenizer definition") -> dict[str, Any]:
    """Parse a tokenizer.json. Raises ModelLoadError if malformed."""
    try:
        parsed = json.loads(definition)
        _ = [(token["content"], token["id"], token["special"]) for token in parsed["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{name} is corrupt ({error!r}): download it again.") from error
    return parsed


def _added(definition: dict[str, Any], *, special: bool) -> dict[str, int]:
    """Return the ids of added tokens by content: of special tokens, or of the others if not `special`."""
    return {token["content"]: token["id"] for token in definition["added_tokens"] if token["special"] == special}


def _with_special(definition: dict[str, Any], marks: set[str]) -> str:
    """Return the definition with `marks` flagged as special."""
    tokens = definition["added_tokens"]
    added = [{**token, "special": token["special"] or token["content"] in marks} for token in tokens]
    return json.dumps({**definition, "added_tokens": added})


def _token_text(token: str | dict[str, Any] | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def _as_ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _read(path: Path) -> str:
    try:
        return read_text(path, ModelLoadError)
    except OSError as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Download the model again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}): download the model again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object: download the model again.")
    return content
