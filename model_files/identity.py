"""Identity of a local model (weights and chat template), since a calibration is valid only for the same model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .gguf_header import GgufHeader

_SAMPLE = 4096  # bytes hashed per tensor: enough to tell weights apart without reading gigabytes at startup
# llama.cpp's names of quantizations, indexed by number: of whole files (`general.file_type`), and of single tensors.
_FILES = (
    dict(enumerate(("F32", "F16", "Q4_0", "Q4_1")))
    | dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"), 7))
    | dict(enumerate(("Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), 16))
    | dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 25))
    | dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4"), 36))
)
_TENSORS = (
    dict(enumerate(("F32", "F16", "Q4_0", "Q4_1")))
    | dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), 6))
    | dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 16))
    | {29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
)


SERVED = "served by "  # prefix of `ModelIdentity.quantization` if another server runs the model


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties of a local model that determine its answers."""

    # Quantization, such as Q4_K_M.
    quantization: str
    # SHA-256 of the tensor table and the first bytes of each tensor.
    weights: str
    # SHA-256 of the chat template in use.
    template: str
    # SHA-256 of the whole file; empty if the file was not read completely.
    sha256: str = ""
    # Package and version of the engine that ran the model.
    engine: str = ""

    def difference(self, other: ModelIdentity) -> tuple[str, str] | None:
        """Return the first difference as a pair of descriptions; None if both models give the same answers."""
        if self.quantization != other.quantization:
            return self.quantization, other.quantization
        if self.weights != other.weights:
            return tuple[str, str](f"{each.quantization} weights {each.weights[:12]}" for each in (self, other))
        if self.template != other.template:
            return tuple[str, str](f"{each.quantization}, chat template {each.template[:12]}" for each in (self, other))
        return None


def quantization_of(header: GgufHeader) -> str:
    """Return the quantization named in the file, else the data type of most weights."""
    if (name := _FILES.get(header.metadata.get("general.file_type", -1))) is not None:
        return name
    weights = Counter[int]()
    for tensor in header.tensors:
        weights[tensor.kind] += prod(tensor.shape)
    kind = weights.most_common(1)[0][0]
    return _TENSORS.get(kind, f"type {kind}")


def weights_of(path: Path, header: GgufHeader) -> str:
    """Return the SHA-256 of the tensor table and a sample of each tensor. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for tensor in sorted(header.tensors, key=lambda each: each.name):  # files list tensors in any order
            digest.update(f"{tensor.name} {tensor.shape} {tensor.kind}\n".encode())
            file.seek(header.data_start + tensor.start)
            digest.update(file.read(min(_SAMPLE, tensor.size or _SAMPLE)))
    return digest.hexdigest()


def digest_of(templates: Mapping[str, str]) -> str:
    """Return the SHA-256 of chat templates, given by name."""
    return hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(templates.items())).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the whole file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
