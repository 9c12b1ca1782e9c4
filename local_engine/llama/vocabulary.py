"""The vocabulary of a GGUF file as grammars want it: every token's bytes, and which of them no text may match."""

from __future__ import annotations

from ...text.grammars.compiler import GrammarCompiler, Vocabulary
from ...text.grammars.state import Grammars
from .library import LlamaModel


def vocabulary(model: LlamaModel) -> Vocabulary:
    """Unused tokens have no bytes, so that no text matches them either."""
    tokens = [model.token_bytes(token, skip_special=False) for token in range(model.vocab_size)]
    return Vocabulary(tokens, sorted(model.special_ids), sorted(model.end_ids))


def grammars(model: LlamaModel) -> Grammars:
    """The grammars of one model; its vocabulary is read with the first of them."""
    compiler = GrammarCompiler(lambda: vocabulary(model), lambda text: model.tokenize(text, allow_special=False))
    return Grammars(compiler, model.vocab_size, model.end_ids)
