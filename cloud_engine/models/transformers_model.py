"""Architectures without a family here: transformers computes the layers, and this engine their paged attention.

The model may keep nothing but keys and values between tokens. Its attention must go through transformers' interface of
attention functions. A short pass after loading records what each layer asks of it, and refuses the rest by name.
"""

# transformers is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels.attention.types import Attention, LayerAttention
from ...protocol.errors import ConfigurationError, MissingDependencyError, ModelLoadError
from .causal_model import CausalModel
from .config import CausalConfig

_NAME = "updraft"
_PROBED_TOKENS = 3
#: Options of attention functions that change nothing here, or that are read.
_KNOWN = {"scaling", "sliding_window", "dropout", "is_causal", "position_ids", "use_cache", "output_attentions", _NAME}
#: Rotations that depend on the longest sequence of a batch, so that cached keys would not stay valid.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_LOG = logging.getLogger(__name__)


class TransformersModel(CausalModel):
    """A model whose layers transformers computes, with the attention of this engine."""

    def __init__(self, causal: Any, architecture: str) -> None:
        """Take over a loaded causal language model. Raises ModelLoadError naming what the engine cannot compute."""
        super().__init__()
        prefix: str = causal.base_model_prefix
        _separate_packable(causal)
        self._base, self._head = getattr(causal, prefix), causal
        setattr(causal, prefix, _Given())  # so that the head's own code maps hidden states to logits
        self.register_buffer("_typed", torch.empty(0, dtype=causal.dtype, device=causal.device), persistent=False)
        probe = _Probe()
        hidden = self._hidden(torch.zeros(_PROBED_TOKENS, dtype=torch.int64), torch.arange(_PROBED_TOKENS), probe)
        self._layers = probe.layers
        self._config = _config(causal.config.get_text_config(), architecture, probe, self.logits(hidden).shape[1])

    @property
    def config(self) -> CausalConfig:
        return self._config

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Implement `CausalModel.forward`."""
        return self._hidden(token_ids, positions, _Pass(attention, self._layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `CausalModel.logits`."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def _hidden(self, token_ids: Tensor, positions: Tensor, attend: _Pass | _Probe) -> Tensor:
        rows = {"input_ids": token_ids[None].to(self.device), "position_ids": positions[None].to(self.device)}
        with torch.inference_mode():
            return self._base(**rows, use_cache=False, **{_NAME: attend}).last_hidden_state[0]

    @property
    def _weight(self) -> Tensor:
        return self.get_buffer("_typed")


@dataclass(frozen=True, slots=True)
class _Pass:
    """The attention of one forward pass, for all layers."""

    attention: Attention
    layers: Mapping[nn.Module, LayerAttention]

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        del options
        projected = torch.cat((query[0], key[0], value[0])).transpose(0, 1).contiguous()
        return self.attention.attend(self.layers[module], projected, None)[None]


@dataclass(slots=True)
class _Probe:
    """Stands for the attention of a first pass, and records what the layers ask of it."""

    layers: dict[nn.Module, LayerAttention] = field(default_factory=dict[nn.Module, LayerAttention])
    windows: list[int | None] = field(default_factory=list[int | None])
    heads: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        unknown = sorted(name for name, each in options.items() if each is not None and name not in _KNOWN)
        if unknown:
            raise ModelLoadError(f"its attention has options that are not supported: {', '.join(unknown)}")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelLoadError("its attention is not causal")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise ModelLoadError("its keys and values have different sizes, as in latent attention")
        if module in self.layers:
            raise ModelLoadError("a layer attends more than once")
        scale, window = options.get("scaling"), options.get("sliding_window")
        scale = query.shape[3] ** -0.5 if scale is None else float(scale)
        self.layers[module] = LayerAttention(len(self.layers), scale, window)
        self.windows.append(window)
        self.heads.add((query.shape[1], key.shape[1], query.shape[3]))
        return query.new_zeros(query.shape).transpose(1, 2)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks (`AttentionInterface`), with queries (1, heads, tokens, head_dim).

    Returns (1, tokens, heads, head_dim). Raises ModelLoadError for a mask, because paged attention takes no masks.
    """
    attend = options.get(_NAME)
    if attend is None:
        raise ModelLoadError("its code does not hand options on to attention functions")
    if attention_mask is not None:
        raise ModelLoadError("its attention has a mask of its own")
    return attend(module, query, key, value, options), None


def load_transformers_model(folder: Path, architecture: str, dtype: torch.dtype | None, device: str) -> CausalModel:
    """Load a folder through transformers. Raises ModelLoadError naming what is missing or not supported."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder}: {architecture} has no implementation of its own here. With transformers, the engine may still "
            "serve it: pip install '.[transformers]' in a clone of Updraft"
        ) from error
    transformers.AttentionInterface.register(_NAME, attention_function)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            attn_implementation=_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}: transformers cannot load {architecture}: {error}") from error
    causal, report = loaded
    for what in ("missing", "unexpected", "mismatched"):
        if names := [str(each) for each in report[f"{what}_keys"]]:
            raise ModelLoadError(f"{folder}: {what} tensors: {', '.join(sorted(names)[:5])}.")
    try:
        _check_state(causal)
        model = TransformersModel(causal.eval().requires_grad_(False).to(device), architecture)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {architecture} cannot be served: {error.message}.") from error
    _LOG.warning("%s: transformers computes the layers of %s; attention is paged as usual", folder, architecture)
    return model


def check_options(architecture: str, *, ranks: int, is_quantized: bool) -> None:
    """Raise ConfigurationError for options of native families."""
    if ranks > 1:
        fault = f"tensor_parallel and pipeline_parallel: transformers computes {architecture}, on one rank only."
        raise ConfigurationError(fault, param="tensor_parallel")
    if is_quantized:
        fault = f"quantization: transformers computes {architecture}, with plain weights only."
        raise ConfigurationError(fault, param="quantization")


def _check_state(causal: Any) -> None:
    config = causal.config.get_text_config()
    if not getattr(causal, "_supports_attention_backend", False):
        raise ModelLoadError("its attention cannot be replaced in transformers")
    if getattr(causal, "_is_stateful", False):
        raise ModelLoadError("it keeps other state than keys and values")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise ModelLoadError(f"it has layers of the kinds {', '.join(other)}")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if kinds := _LENGTH_DEPENDENT.intersection(_rope_types(rope)):
        raise ModelLoadError(f"its rotation is of the kind {', '.join(sorted(kinds))}")


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotation, also if each kind of layer has its own."""
    for each in (parameters, *parameters.values()):
        if isinstance(each, Mapping):
            yield str(cast("Mapping[str, Any]", each).get("rope_type", "default"))


def _config(config: Any, architecture: str, probe: _Probe, vocab_size: int) -> CausalConfig:
    if len(probe.layers) != config.num_hidden_layers:
        raise ModelLoadError(f"only {len(probe.layers)} of its {config.num_hidden_layers} layers attend")
    if len(probe.heads) > 1:
        raise ModelLoadError("its layers have different heads")
    context_length = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_length, int):
        raise ModelLoadError("max_position_embeddings is missing in its configuration")
    ((heads, kv_heads, head_dim),) = probe.heads
    return CausalConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(probe.layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        windows=tuple(probe.windows) if any(probe.windows) else (),
    )


class _Given(nn.Module):
    """Stands for the layers below the head: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Final:
        return _Final(inputs_embeds)


class _Final:
    """The output of layers. All fields that architectures add to it are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Rows(nn.Module):
    """A linear layer or embedding that is packed later, and then takes rows without a batch dimension."""

    def __init__(self, layer: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.layer: nn.Module = layer
        self._row_dims = int(isinstance(layer, nn.Linear))

    @property
    def weight(self) -> Tensor:
        return cast("Tensor", self.layer.weight)

    def forward(self, rows: Tensor) -> Tensor:
        leading = rows.shape[: rows.dim() - self._row_dims]
        return self.layer(rows.reshape(leading.numel(), *rows.shape[len(leading) :])).unflatten(0, leading)


def _separate_packable(causal: nn.Module) -> None:
    """Put all plain linear layers and embeddings into `_Rows`.

    Embeddings with code of their own keep it: a head with the same weights gets a copy, because packing would replace
    such an embedding by a lookup in the head.
    """
    places = [(parent, *child) for parent in causal.modules() for child in parent.named_children()]
    embeddings = [child for _, _, child in places if isinstance(child, nn.Embedding)]
    special = {child.weight.data_ptr() for child in embeddings if type(child) is not nn.Embedding}
    for parent, name, child in places:
        if type(child) is nn.Linear and child.weight.data_ptr() in special:
            child.weight = nn.Parameter(child.weight.detach().clone(), requires_grad=False)
        if type(child) is nn.Linear or type(child) is nn.Embedding:
            setattr(parent, name, _Rows(child))
