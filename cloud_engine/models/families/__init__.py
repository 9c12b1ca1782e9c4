"""The model families, one module each. Register a new family in `FAMILIES`."""

from __future__ import annotations

from .family import Family
from .gemma3 import GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3)
