"""The tokenizer of a model folder: Hugging Face's `tokenizers` under the two rules this project adds.

Text from users never produces special tokens, and every token has exact bytes, so that streaming is a matter of UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..protocol.errors import ModelLoadError
from ..protocol.requests import Message
from ..protocol.structured import Tool
from ..protocol.unicode_forms import read_text
from .chat import ChatTemplate, encoding_runs, special_pattern

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Thread-safe. `eos_ids`: tokens that end an answer; `vocab_size`: highest id plus one; `special_ids`: controls."""

    def __init__(self, definition: str, *, eos_ids: Iterable[int], chat_template: ChatTemplate | None = None) -> None:
        """`definition` is the text of a tokenizer.json. Raises ModelLoadError if it cannot be used."""
        try:
            self._special_mode = tokenizers.Tokenizer.from_str(definition)
            self._plain_mode = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises nothing more precise
            raise ModelLoadError(f"The tokenizer definition is not usable: {error}") from error
        for mode in (self._special_mode, self._plain_mode):  # settings of a training run, never wanted here
            mode.no_truncation()
            mode.no_padding()
        self._plain_mode.encode_special_tokens = True
        self._token_bytes = _byte_decoder(json.loads(definition).get("decoder"))
        added = self._plain_mode.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = special_pattern(added[token_id].content for token_id in self.special_ids)
        self.vocab_size = max(self._plain_mode.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`, and where present `tokenizer_config.json`, `generation_config.json` and a template.

        Raises ModelLoadError naming the file that is missing or damaged.
        """
        definition = _read(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        vocabulary = _added_tokens(definition, folder)
        eos_token = _token_text(config.get("eos_token"))
        eos_ids = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        if eos_token in vocabulary:
            eos_ids.add(vocabulary[eos_token])
        source = _template_source(folder, config)
        template = source and ChatTemplate(
            source, bos_token=_token_text(config.get("bos_token")), eos_token=eos_token, special_tokens=vocabulary
        )
        return cls(definition, eos_ids=eos_ids, chat_template=template or None)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text` alone, nothing added. Special tokens in it are read as such only if allowed."""
        mode = self._special_mode if allow_special else self._plain_mode
        return mode.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with whatever the model wants around it (a BOS token, usually)."""
        return self._plain_mode.encode(text, add_special_tokens=True).ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of the rendered chat; special tokens come from the template only, never from a message.

        Raises ModelLoadError if the model has no chat template or a broken one, InvalidRequestError if that refuses the
        messages.
        """
        if self.chat_template is None:
            raise ModelLoadError("This model has no chat template: use text completions, or add chat_template.jinja.")
        segments = self.chat_template.segments(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        runs = encoding_runs(segments, self._special)
        return [token_id for run in runs for token_id in self.encode(run.text, allow_special=run.is_control)]

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


def gpt2_byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte value, as character -> byte (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_decoder(decoder: dict[str, Any] | None) -> Any:
    """How a vocabulary entry becomes bytes, from the `decoder` of tokenizer.json: byte-level or byte-fallback."""
    kinds = [step["type"] for step in (decoder or {}).get("decoders", [decoder] if decoder else [])]
    if "ByteLevel" in kinds:
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


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    """The template of `chat_template.jinja`, else of tokenizer_config.json (the one named default, if several)."""
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return _read(own_file)
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return template


def _added_tokens(definition: str, folder: Path) -> dict[str, int]:
    """Content and id of the special tokens in a tokenizer.json."""
    try:
        return {token["content"]: token["id"] for token in json.loads(definition)["added_tokens"] if token["special"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{folder / 'tokenizer.json'} is damaged ({error!r}): fetch it again.") from error


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
