"""A model with what serving it needs besides its weights: a name, a tokenizer, and its authors' defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...protocol.errors import ConfigurationError, ModelLoadError
from ...text.tokenizer import Tokenizer
from ..models.config import default_temperature
from ..models.decoder import Decoder
from ..models.hub import name_of
from ..models.loader import Progress, load_model
from .config import EngineConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`eos_ids` are the tokens that end an answer; `default_temperature` serves requests that name none."""

    weights: Decoder
    model_id: str = "model"
    tokenizer: Tokenizer | None = None
    eos_ids: frozenset[int] = frozenset()
    default_temperature: float = 1.0

    @classmethod
    def from_folder(cls, folder: Path, config: EngineConfig, progress: Progress | None = None) -> ServedModel:
        """Load a Hugging Face style folder. Raises ModelLoadError naming what is missing, damaged or unsupported."""
        if folder.is_file():
            raise ModelLoadError(
                f"{folder}: a single file can be the draft, but the served model needs a folder with its tokenizer."
            )
        weights = load_weights(folder, config, progress)
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer.vocab_size > weights.config.vocab_size:
            raise ConfigurationError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
                f"{weights.config.vocab_size}: these files do not belong together."
            )
        return cls(weights, name_of(folder), tokenizer, tokenizer.eos_ids, default_temperature(folder))


def load_weights(path: Path, config: EngineConfig, progress: Progress | None = None) -> Decoder:
    """A folder or a GGUF file, in the engine's dtype and on its device. Raises ModelLoadError."""
    return load_model(path, dtype=_DTYPES[config.dtype], device=config.device, progress=progress)
