"""Mistral: the architecture of Llama. The first version also has a sliding window in every layer."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder, windows_of


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    return read_decoder(fields, windows=windows_of(fields, lambda _: True))


MISTRAL = Family(("MistralForCausalLM",), read_config, SPLIT)
