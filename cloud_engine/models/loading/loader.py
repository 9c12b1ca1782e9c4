"""From a folder or a GGUF file to a model ready to run. Every tensor must be there, and none may be left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..decoder import Decoder
from ..families import FAMILIES
from ..families.family import Family, architecture
from ..fields import Fields
from .checkpoint import Checkpoint, SafetensorsFolder
from .gguf_file import GgufFile

#: Called after every parameter with how many bytes are loaded, and of how many.
Progress = Callable[[int, int], None]


def load_model(
    path: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """Load a Hugging Face style folder or a GGUF file, weights converted to `dtype` one by one.

    Raises ModelLoadError for an unknown architecture, a missing or damaged file, and for tensors that are missing,
    unexpected or of the wrong shape; the message names them.
    """
    checkpoint = GgufFile(path) if path.suffix == ".gguf" else SafetensorsFolder(path)
    family = family_of(checkpoint.fields)
    config = family.read_config(checkpoint.fields)
    with torch.device("meta"):
        model = Decoder(config)
    parameters = dict(model.named_parameters())  # a tied head is not listed twice
    sources = family.sources(list(parameters))
    _check_names(checkpoint, sources, tied_head=config.tie_word_embeddings)
    total = sum(parameter.numel() for parameter in parameters.values()) * dtype.itemsize
    state: dict[str, Tensor] = {}
    loaded = 0
    for name, parts in sources.items():
        rows = _rows(checkpoint, parts, parameters[name].shape)
        state[name] = torch.empty(parameters[name].shape, dtype=dtype, device=device)
        for part, piece in zip(parts, state[name].split(rows), strict=True):
            checkpoint.copy_into(part, piece)
        loaded += state[name].nbytes
        if progress:
            progress(loaded, total)
    model.load_state_dict(state, assign=True, strict=False)  # `_check_names` has been stricter
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def family_of(fields: Fields) -> Family:
    """The family whose configuration `fields` are. Raises ModelLoadError for an architecture that is not known."""
    wanted = architecture(fields)
    for family in FAMILIES:
        if wanted in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelLoadError(f"{fields.where}: architecture {wanted!r} is unknown; supported: {known}.")


def _check_names(checkpoint: Checkpoint, sources: Mapping[str, tuple[str, ...]], *, tied_head: bool) -> None:
    expected = {part for parts in sources.values() for part in parts}
    missing, unexpected = checkpoint.difference(expected)
    _refuse(checkpoint.where, "lacks", missing)
    # Some exporters write what follows from the rest: rotary frequencies, a tied head.
    derived = ("rotary_emb.inv_freq", "lm_head.weight") if tied_head else ("rotary_emb.inv_freq",)
    _refuse(checkpoint.where, "has unexpected", {name for name in unexpected if not name.endswith(derived)})


def _rows(checkpoint: Checkpoint, parts: tuple[str, ...], wanted: tuple[int, ...]) -> list[int]:
    """Of each part; their shapes are looked at before there is memory for what the configuration says."""
    shapes = [checkpoint.shape(part) for part in parts]
    rows = [shape[0] for shape in shapes]
    if any(shape[1:] != wanted[1:] for shape in shapes) or sum(rows) != wanted[0]:
        found = " + ".join(f"{part} {shape}" for part, shape in zip(parts, shapes, strict=True))
        raise ModelLoadError(
            f"{checkpoint.where}: {found} has the wrong shape, the configuration asks for {tuple(wanted)}."
        )
    return rows


def _refuse(where: str, what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ModelLoadError(f"{where} {what} tensors: {shown}.")
