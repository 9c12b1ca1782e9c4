"""The tiny model of `tiny_gguf`, written once per session."""

import pytest
from tiny_gguf import TinyModel, random_weights, train_tokenizer, write_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyModel:
    tokenizer = train_tokenizer()
    weights = random_weights(tokenizer.get_vocab_size())
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, weights, tokenizer)
    return TinyModel(path, weights, tokenizer)
