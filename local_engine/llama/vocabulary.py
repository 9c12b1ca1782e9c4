"""Vocabulary of a GGUF file for grammars: every token's bytes, the special tokens and the end-of-answer tokens."""

from __future__ import annotations

from ...text.grammars.compiler import GrammarCompiler, Vocabulary
from ...text.grammars.state import Grammars
from .library import LlamaModel


def vocabulary(model: LlamaModel) -> Vocabulary:
    """Return the vocabulary. Unused tokens have no bytes, so that no text matches them."""
    tokens = [model.token_bytes(token, skip_special=False) for token in range(model.vocab_size)]
    return Vocabulary(tokens, sorted(model.special_ids), sorted(model.end_ids))


def grammars(model: LlamaModel) -> Grammars:
    """Return a factory of grammar states for one model. It reads the vocabulary when the first grammar is compiled."""
    compiler = GrammarCompiler(lambda: vocabulary(model), lambda text: model.tokenize(text, allow_special=False))
    return Grammars(compiler, model.vocab_size, model.end_ids)
