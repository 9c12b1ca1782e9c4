"""The model families, one module each. Register a new family in `FAMILIES`."""

from __future__ import annotations

from .deepseek import DEEPSEEK2, DEEPSEEK3
from .family import Family
from .gemma3 import GEMMA3
from .glm_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3, SMOLLM3, OLMO2),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, GLM4_MOE, DEEPSEEK2, DEEPSEEK3),
)
