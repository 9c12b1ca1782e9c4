"""Tokenizers of GGUF files, as definitions for Hugging Face's `tokenizers`. Source: `llama-vocab.cpp` in llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ....model_files.gguf_header import GgufHeader
from ....model_files.gguf_reader import read_header, read_numbers, read_texts
from ....protocol.errors import ModelLoadError
from ....text.templates.sources import TemplateSources
from ....text.tokenizer import PromptEnds, Tokenizer, TokenizerParts

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Expressions that split a text one after another, by `tokenizer.ggml.pre`.
_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (rf"{_WORDS}|\p{{N}}|{_REST}",)),
    "gpt-4o": ("|".join([*(f"{word}(?i:{_CONTRACTIONS})?" for word in _CASED), r"\p{N}{1,3}", _CASED_REST]),),
    "tekken": ("|".join([*_CASED, r"\p{N}", _CASED_REST]),),
}
#: Whole tokens win over merges in these vocabularies.
_IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
#: Texts of control tokens that end a turn or an answer, besides those that the file names.
_ENDS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>")
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPACE = "▁"


def load_tokenizer(model: Path, *, chat_template: str | None = None, tool_call_parser: str = "auto") -> Tokenizer:
    """Return the tokenizer of a folder or of a GGUF file. The options and errors of `Tokenizer.from_folder`."""
    if model.is_dir():
        return Tokenizer.from_folder(model, chat_template=chat_template, tool_call_parser=tool_call_parser)
    return Tokenizer.from_parts(gguf_tokenizer(model), chat_template, tool_call_parser)


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer in a GGUF file. Raises ModelLoadError if it is missing or not supported."""
    header = read_header(path)
    texts, kinds = _array(path, header, "tokens"), _array(path, header, "token_type")
    ids = {text: token_id for token_id, text in enumerate(cast("list[str]", texts))}
    model = header.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        parts = _byte_level(path, header, ids)
    elif model == "llama":
        parts = _with_spaces(ids, _array(path, header, "scores"), prefix=_setting(header, "add_space_prefix", True))
    else:
        raise ModelLoadError(f"{path}: tokenizers of the kind {model!r} are not supported; supported: gpt2, llama.")
    added = [
        _added_token(token_id, texts[token_id].replace(_SPACE, " ") if model == "llama" else texts[token_id], kind)
        for token_id, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    definition = {"version": "1.0", "added_tokens": added, "post_processor": None, **parts}
    special = {token["content"]: token["id"] for token in added if token["special"]}
    ends = {header.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    ends |= {special[text] for text in _ENDS & special.keys()}
    has_bos = _setting(header, "add_bos_token", model == "llama")
    return TokenizerParts(
        path.stem,
        json.dumps(definition),
        PromptEnds(
            _text(texts, header.metadata.get("tokenizer.ggml.bos_token_id")),
            _text(texts, header.metadata.get("tokenizer.ggml.eos_token_id")),
            add_bos=has_bos,
            add_eos=_setting(header, "add_eos_token", False),
        ),
        frozenset(token_id for token_id in ends if isinstance(token_id, int) and 0 <= token_id < len(texts)),
        TemplateSources.of_gguf(header.metadata),
    )


def _byte_level(path: Path, header: GgufHeader, ids: Mapping[str, int]) -> dict[str, Any]:
    pre = header.metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ModelLoadError(
            f"{path}: texts are split by {pre!r} (tokenizer.ggml.pre), which is not supported. Use a file with one of "
            f"{', '.join(_SPLITS)}, or a folder with tokenizer.json."
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _SPLITS[pre]
    ]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    merges = [merge.split(" ", 1) for merge in cast("list[str]", _array(path, header, "merges"))]
    return {
        "normalizer": {"type": "NFC"} if "qwen" in pre else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_only]},
        "model": _bpe(ids, merges, ignore_merges=pre in _IGNORES_MERGES),
        "decoder": {**bytes_only, "use_regex": True},
    }


def _with_spaces(ids: Mapping[str, int], scores: Sequence[float], *, prefix: bool) -> dict[str, Any]:
    """Return the parts of a SentencePiece vocabulary, whose merges follow from the scores of their results."""
    merges: list[tuple[float, int, str, str]] = []
    for text, token_id in ids.items():
        for at in range(1, len(text)):
            if text[:at] in ids and text[at:] in ids:
                merges.append((-scores[token_id], token_id, text[:at], text[at:]))
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    of_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, of_spaces]},
        "pre_tokenizer": None,
        "model": _bpe(ids, [[left, right] for _, _, left, right in sorted(merges)], byte_fallback=True),
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *end]},
    }


def _bpe(ids: Mapping[str, int], merges: list[list[str]], **options: bool) -> dict[str, Any]:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **options}
    return {"type": "BPE", **usual, **flags, "vocab": dict(ids), "merges": merges}


def _added_token(token_id: int, text: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": kind != _USER_DEFINED}


def _array(path: Path, header: GgufHeader, name: str) -> list[Any]:
    array = header.arrays.get(f"tokenizer.ggml.{name}")
    if array is None:
        raise ModelLoadError(f"{path} has no tokenizer.ggml.{name}: use a file with the whole tokenizer.")
    return read_texts(path, array) if name in ("tokens", "merges") else read_numbers(path, array)


def _setting(header: GgufHeader, name: str, usual: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, bool) else usual


def _text(texts: Sequence[str], token_id: object) -> str:
    return texts[token_id] if isinstance(token_id, int) and 0 <= token_id < len(texts) else ""
