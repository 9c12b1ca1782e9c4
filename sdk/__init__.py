"""Layer 7: drop-in OpenAI clients. This package loads `openai`, so `import updraft` imports it only on first use."""

from .client import AsyncOpenAI, OpenAI

__all__ = ["AsyncOpenAI", "OpenAI"]
