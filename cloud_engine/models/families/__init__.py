"""The model families, one module each. Register a new family in `FAMILIES`."""

from __future__ import annotations

from .family import Family
from .gemma3 import GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3
from .smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3, SMOLLM3, OLMO2)
