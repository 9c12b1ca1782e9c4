"""A model folder's `config.json`, read into the few numbers the architectures need, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.errors import ModelLoadError

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Names follow Hugging Face's `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`. Raises ModelLoadError if it is missing, damaged or asks for what we lack."""
        raw = read_json(folder / "config.json")
        missing = [name for name in _REQUIRED if not isinstance(raw.get(name), int)]
        if missing:
            raise ModelLoadError(f"{folder}/config.json lacks {', '.join(missing)}.")
        _refuse_unsupported(raw, folder)
        heads = raw["num_attention_heads"]
        config = cls(
            architecture=str((raw.get("architectures") or ["unknown"])[0]),
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            context_length=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(_rope(raw).get("rope_theta", 10000.0)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
        if config.num_heads % config.num_kv_heads:
            raise ModelLoadError(
                f"{folder}/config.json: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads."
            )
        return config


def default_temperature(folder: Path) -> float:
    """The temperature the model's authors recommend (`generation_config.json`); 0 where they do not sample."""
    path = folder / "generation_config.json"
    raw = read_json(path) if path.is_file() else {}
    if raw.get("do_sample") is False:
        return 0.0
    value = raw.get("temperature", 1.0)
    if not isinstance(value, int | float) or value < 0:
        raise ModelLoadError(f"{path}: temperature must be a number of at least 0, got {value!r}.")
    return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelLoadError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist: give a Hugging Face style model folder.") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    older = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    return {**older, **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    rope = _rope(raw)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    wanted = {
        "rope_type": (rope_type, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "mlp_bias": (raw.get("mlp_bias", False), False),
    }
    for name, (got, supported) in wanted.items():
        if got != supported:
            raise ModelLoadError(f"{folder}/config.json: {name}={got!r} is not supported, only {supported!r} is.")
