"""The tokenizer of a model folder: Hugging Face's `tokenizers` under the two rules this project adds.

Text from users never produces special tokens, and every token has exact bytes, so that streaming is a matter of UTF-8.
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
from .chat import ChatTemplate, encoding_runs, special_pattern
from .detokenize import gpt2_byte_alphabet
from .marks import typed_marks
from .templates.sources import TemplateSources

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONG = 2**13  # characters: some milliseconds
_log = logging.getLogger("updraft.text")


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """The tokens that tokenizer_config.json puts around a prompt. None: as tokenizer.json does it."""

    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool | None = None
    add_eos: bool | None = None


class Tokenizer:
    """Thread-safe. `eos_ids`: tokens that end an answer; `vocab_size`: highest id plus one; `special_ids`: controls."""

    def __init__(
        self,
        definition: str,
        *,
        eos_ids: Iterable[int],
        chat_template: ChatTemplate | None = None,
        ends: PromptEnds = PromptEnds(),
    ) -> None:
        """`definition` is the text of a tokenizer.json. Raises ModelLoadError if it cannot be used."""
        parsed = _parsed(definition)
        sources = () if chat_template is None else (chat_template.source, chat_template.tool_source)
        marks = set(typed_marks(_added(parsed, special=False), *sources))
        try:
            self._special_mode = tokenizers.Tokenizer.from_str(definition)
            self._plain_mode = tokenizers.Tokenizer.from_str(_with_special(parsed, marks) if marks else definition)
        except Exception as error:  # the library raises nothing more precise
            raise ModelLoadError(f"The tokenizer definition is not usable: {error}") from error
        for mode in (self._special_mode, self._plain_mode):  # settings of a training run, never wanted here
            mode.no_truncation()
            mode.no_padding()
        self._plain_mode.encode_special_tokens = True
        self._token_bytes = _byte_decoder(parsed)
        added = self._special_mode.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = special_pattern([*marks, *(added[token_id].content for token_id in self.special_ids)])
        self.vocab_size = max(self._plain_mode.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self._ends = ends
        self._bos_id, self._eos_id = map(self._plain_mode.token_to_id, (ends.bos_token, ends.eos_token))
        self._longest_chat: int | None = None  # bytes
        self._front: list[int] = []  # of every chat
        if self._bos_id is not None and self.encode_prompt("")[:1] == [self._bos_id]:
            self._front = [self._bos_id]

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None = None, tool_parser: str = "auto") -> Tokenizer:
        """Read `tokenizer.json`, and where present `tokenizer_config.json`, `generation_config.json` and templates.

        `chat_template`: another one, as `TemplateSources.of` takes it. Raises ModelLoadError naming the file that is
        missing or damaged, ConfigurationError for a template that cannot be read.
        """
        definition = _read(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        parsed = _parsed(definition, str(folder / "tokenizer.json"))
        eos_token, bos_token = _token_text(config.get("eos_token")), _token_text(config.get("bos_token"))
        eos_ids = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        special = _added(parsed, special=True)
        if eos_token in special:
            eos_ids.add(special[eos_token])
        tokens = special | _added(parsed, special=False)
        sources = TemplateSources.of(folder.name, _templates(folder, config), chat_template, tokens)
        if tool_parser != "auto":
            sources = replace(sources, tool_style=tool_parser)
        marks = typed_marks(_added(parsed, special=False), sources.default, sources.tool_use)
        template = ChatTemplate(sources, bos_token=bos_token, eos_token=eos_token, special_tokens=[*special, *marks])
        ends = PromptEnds(bos_token, eos_token, config.get("add_bos_token"), config.get("add_eos_token"))
        return cls(definition, eos_ids=eos_ids, chat_template=template, ends=ends)

    def limit(self, context_length: int) -> int:
        """The most bytes that so many tokens stand for. From here on, longer chats are refused."""
        self._longest_chat = context_length * max(len(self.token_bytes(token)) for token in range(self.vocab_size))
        return self._longest_chat

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text` alone, nothing added. Special tokens in it are read as such only if allowed."""
        return _ids(self._special_mode if allow_special else self._plain_mode, text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with whatever the model wants around it (a BOS token, usually)."""
        ids = _ids(self._plain_mode, text, add_special_tokens=True)
        begun, ended = ids[:1] == [self._bos_id], ids[-1:] == [self._eos_id]  # by tokenizer.json: no text makes these
        wants_bos, wants_eos = self._ends.add_bos, self._ends.add_eos
        if wants_bos is not None and wants_bos != begun and self._bos_id is not None:
            ids = [self._bos_id, *ids] if wants_bos else ids[1:]
        if wants_eos is not None and wants_eos != ended and self._eos_id is not None:
            ids = [*ids, self._eos_id] if wants_eos else ids[:-1]
        return ids

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]:
        """Token ids of the rendered chat; special tokens come from the template only, never from a message.

        A BOS token that the model wants and the template does not write comes first. Raises ModelLoadError if the model
        has no chat template or a broken one, InvalidRequestError if that refuses the messages, ContextLengthError after
        `limit`.
        """
        if self.chat_template is None:
            raise ModelLoadError("This model has no chat template: give one with --chat-template.")
        runs = encoding_runs(self.chat_template.segments(messages, **options), self._special)
        if self._longest_chat is not None and (length := sum(len(run.text) for run in runs)) > self._longest_chat:
            raise ContextLengthError(
                f"messages: {length} characters; this model's context cannot hold more than {self._longest_chat}.",
                param="messages",
            )
        ids = [token_id for run in runs for token_id in self.encode(run.text, allow_special=run.is_control)]
        return ids if ids[:1] == self._front else self._front + ids

    def vocabulary(self) -> dict[str, int]:
        """Every token, as the tokenizer writes it, and its id."""
        return self._plain_mode.get_vocab(with_added_tokens=True)

    def special_id(self, text: str) -> int | None:
        """The id of the special token written `text`; None if that is no special token here."""
        token_id = self._plain_mode.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in ids).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes `token_id` stands for: empty for special tokens (unless asked for) and for unused ids."""
        if skip_special and token_id in self.special_ids:
            return b""
        token = self._plain_mode.id_to_token(token_id)
        return b"" if token is None else self._token_bytes(token)


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. `encode` holds up every thread for a second per megabyte, a batch holds up none."""
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _byte_decoder(definition: dict[str, Any]) -> Any:
    """The bytes of a vocabulary entry, by the `decoder` of tokenizer.json: byte-level or byte-fallback."""
    decoder: dict[str, Any] | None = definition.get("decoder")
    kinds = [step["type"] for step in (decoder or {}).get("decoders", [decoder] if decoder else [])]
    if "ByteLevel" in kinds:
        if definition.get("pre_tokenizer") is None:
            _log.warning(
                "The tokenizer has no pre_tokenizer: text is split as the model never learnt it, and answers may be "
                "poor. Fetch the model again, with the tokenizer.json it was published with."
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


def _templates(folder: Path, config: dict[str, Any]) -> TemplateSources | None:
    """Those of the folder by their names, in the order in which transformers looks for them."""
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
    """A tokenizer.json. Raises ModelLoadError."""
    try:
        parsed = json.loads(definition)
        _ = [(token["content"], token["id"], token["special"]) for token in parsed["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{name} is damaged ({error!r}): fetch it again.") from error
    return parsed


def _added(definition: dict[str, Any], *, special: bool) -> dict[str, int]:
    """Content and id of the added tokens that are special, or of those that are not."""
    return {token["content"]: token["id"] for token in definition["added_tokens"] if token["special"] == special}


def _with_special(definition: dict[str, Any], marks: set[str]) -> str:
    """The definition with these tokens special, too."""
    added = [
        {**token, "special": token["special"] or token["content"] in marks} for token in definition["added_tokens"]
    ]
    return json.dumps({**definition, "added_tokens": added})


def _token_text(token: str | dict[str, Any] | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def _as_ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _read(path: Path) -> str:
    try:
        return read_text(path, ModelLoadError)
    except OSError as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. A model folder needs it; fetch the model again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}): fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object: fetch the model again.")
    return content
