"""Tokenization of user text, and checks of a GGUF file's tokenizer settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...model_files.gguf_header import GgufHeader
from ...text.chat import special_pattern
from .library import LlamaModel


class PlainText:
    """Tokenizes user text so that special `marks` in the text stay plain text.

    llama.cpp recognizes USER_DEFINED tokens anywhere in a text. So each mark is cut in two, at the position that gives
    the fewest tokens: that is how a tokenizer without the mark would read it.
    """

    def __init__(self, model: LlamaModel, marks: Iterable[str]) -> None:
        self._model = model
        self._pattern = special_pattern(marks)
        self._cuts: dict[str, int] = {}

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text` alone."""
        ids: list[int] = []
        start = 0
        for match in () if self._pattern is None else self._pattern.finditer(text):
            end = match.start() + self._cut(match.group())
            ids += self._model.tokenize(text[start:end], allow_special=False)
            start = end
        return ids + self._model.tokenize(text[start:], allow_special=False)

    def _cut(self, mark: str) -> int:
        if mark not in self._cuts:
            self._cuts[mark] = min(
                range(1, len(mark)), key=lambda at: self._tokens(mark[:at]) + self._tokens(mark[at:])
            )
        return self._cuts[mark]

    def _tokens(self, text: str) -> int:
        return len(self._model.tokenize(text, allow_special=False))


def suspicious_settings(header: GgufHeader) -> Iterator[str]:
    """Yield warnings about tokenizer settings that are missing from the file."""
    again = "Answers may be poor: convert the model again with a current llama.cpp, or download another file."
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        pre = header.metadata.get("tokenizer.ggml.pre")
        if pre in (None, "", "default"):
            yield f"tokenizer.ggml.pre is {pre or 'missing'}: text may be split differently than in training. {again}"
    if "tokenizer.ggml.token_type" not in header.arrays:
        yield f"tokenizer.ggml.token_type is missing: special tokens cannot be distinguished from text. {again}"
