"""Detection of control tokens, such as turn marks, that model files do not flag as special.

GGUF files mark such tokens as USER_DEFINED; tokenizer.json lists them as added, but not special. Users must not be able
to write them. Both lists also contain harmless tokens (runs of spaces, words, HTML tags), which users may write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

_BRACKETED = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_TAG_OF_HTML = re.compile(r"</?[a-z]{1,10}[1-6]?/?>")


def unflagged_control_tokens(tokens: Iterable[str], *templates: str) -> list[str]:
    """Select tokens that users must not write: words in brackets, but HTML tags only if a template contains them."""
    return [
        token
        for token in tokens
        if _BRACKETED.fullmatch(token)
        and (not _TAG_OF_HTML.fullmatch(token) or any(token in template for template in templates))
    ]


class HasSpecialTokens(Protocol):
    """Interface of a `Tokenizer`, or the local engine's equivalent."""

    def special_id(self, text: str) -> int | None: ...


def marks_of(model: HasSpecialTokens, texts: Iterable[str]) -> dict[int, str]:
    """Return those of `texts` that are special tokens, by token id. Decoders leave the texts of special tokens out."""
    ids = {text: model.special_id(text) for text in texts if text}
    return {token_id: text for text, token_id in ids.items() if token_id is not None}
