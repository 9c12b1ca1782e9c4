"""A model with its name, tokenizer and default sampling parameters, and the weights of a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ....model_files.sampling_defaults import default_sampling
from ....protocol.errors import ConfigurationError
from ....protocol.sampling import PLAIN_SAMPLING, SamplingDefaults
from ....text.grammars.compiler import GrammarCompiler, Vocabulary
from ....text.grammars.state import Grammars
from ....text.tokenizer import Tokenizer
from ...models.causal_model import CausalModel
from ...models.loading.gguf_file import gguf_vocabulary
from ...models.loading.gguf_tokenizer import load_tokenizer
from ...models.loading.hub import name_of
from ...models.loading.loader import Progress, load_any_model
from ...models.sharding import ALONE, ModelGroup
from ..config import EngineConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model. `eos_ids` end an answer; `sampling` has the defaults for requests that set no value."""

    weights: CausalModel
    model_id: str = "model"
    tokenizer: Tokenizer | None = None
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingDefaults = PLAIN_SAMPLING

    @classmethod
    def from_folder(
        cls, folder: Path, config: EngineConfig, progress: Progress | None = None, group: ModelGroup = ALONE
    ) -> ServedModel:
        """Load a Hugging Face style folder or a GGUF file. Raises ModelLoadError naming what is missing or damaged."""
        weights = load_weights(folder, config, progress, group)
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab_size > weights.config.vocab_size:
            raise ConfigurationError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
                f"{weights.config.vocab_size}. Use the tokenizer that belongs to the model."
            )
        return cls(weights, name_of(folder), tokenizer, tokenizer.eos_ids, default_sampling(folder))

    def grammars(self) -> Grammars | None:
        """Return the compiler of constraints over this model's tokens; None without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, self.eos_ids), tokenizer.encode)
        return Grammars(compiler, self.weights.config.vocab_size, self.eos_ids, num_tokens=tokenizer.vocab_size)


def load_weights(
    folder: Path, config: EngineConfig, progress: Progress | None = None, group: ModelGroup = ALONE
) -> CausalModel:
    """Load this rank's part of the weights. Raises ModelLoadError."""
    dtype = _DTYPES.get(config.dtype, torch.float32 if config.device == "cpu" else None)
    return load_any_model(
        folder, dtype=dtype, device=config.device, progress=progress, group=group, quantization=config.quantization
    )


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model. `vocabulary` maps tokens to ids; None if its files contain no tokenizer."""

    weights: CausalModel
    vocabulary: Mapping[str, int] | None = None

    @classmethod
    def from_path(cls, path: Path, target: CausalModel) -> DraftWeights:
        """Load a folder or a GGUF file, with the type and device of the `target`'s weights. Raises ModelLoadError."""
        weights = load_any_model(path, dtype=target.dtype, device=str(target.device))
        if path.suffix == ".gguf":
            return cls(weights, gguf_vocabulary(path))
        has_tokenizer = (path / "tokenizer.json").exists()
        return cls(weights, Tokenizer.from_folder(path).vocabulary() if has_tokenizer else None)
