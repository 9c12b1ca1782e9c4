"""Users' text as tokens of a GGUF file's vocabulary, and checks of the file's tokenizer settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...model_files.gguf_header import GgufHeader
from ...text.chat import special_pattern
from .library import LlamaModel


class PlainText:
    """Tokenizes what users write: `marks` in it stay text.

    llama.cpp reads tokens that a file calls USER_DEFINED wherever they stand. So a mark is cut in two, where its halves
    make the fewest tokens: that is how it would be read if it were none.
    """

    def __init__(self, model: LlamaModel, marks: Iterable[str]) -> None:
        self._model = model
        self._pattern = special_pattern(marks)
        self._cuts: dict[str, int] = {}

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
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
    """Warnings about settings that the file's tokenizer lacks."""
    again = "Answers may be poor: convert the model again, with a current llama.cpp, or download another file."
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        pre = header.metadata.get("tokenizer.ggml.pre")
        if pre in (None, "", "default"):
            yield f"tokenizer.ggml.pre is {pre or 'missing'}: text may be split as the model never learnt it. {again}"
    if "tokenizer.ggml.token_type" not in header.arrays:
        yield f"tokenizer.ggml.token_type is missing: special tokens cannot be told from text. {again}"
