"""From a Hugging Face folder to a model ready to run. Every tensor must be there, and none may be left over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...protocol.errors import ModelLoadError
from .config import ModelConfig
from .llama import Llama

if TYPE_CHECKING:
    from collections.abc import Callable

ARCHITECTURES: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama}


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
    """Load `config.json` and `model.safetensors` from `folder`, weights converted to `dtype`.

    Raises ModelLoadError for an unknown architecture, a missing or damaged file, and for tensors that are missing,
    unexpected or of the wrong shape; the message names them.
    """
    config = ModelConfig.from_folder(folder)
    if config.architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{folder}: architecture {config.architecture!r} is unknown; supported: {', '.join(ARCHITECTURES)}."
        )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist: only single-file safetensors weights are supported.")
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config)
    try:
        with safe_open(path, framework="pt", device=device) as weights:
            _assign(model, set(weights.keys()), weights.get_tensor, dtype, path)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}") from error
    return model.eval().requires_grad_(False)


def _assign(model: Llama, present: set[str], read: Callable[[str], Tensor], dtype: torch.dtype, path: Path) -> None:
    sources = model.checkpoint_names(model.config)
    expected = {name for parts in sources.values() for name in parts}
    if model.config.tie_word_embeddings:
        present.discard("lm_head.weight")  # some exporters write the tied head a second time
    _refuse(path, "lacks", expected - present)
    _refuse(path, "has unexpected", present - expected)
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, parts in sources.items():
        tensor = torch.cat([read(part).to(dtype) for part in parts])
        if tensor.shape != parameters[name].shape:
            raise ModelLoadError(
                f"{path}: {' + '.join(parts)} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {tuple(parameters[name].shape)}."
            )
        state[name] = tensor
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)


def _refuse(path: Path, what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ModelLoadError(f"{path} {what} tensors: {shown}.")
