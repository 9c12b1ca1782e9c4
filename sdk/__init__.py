"""Layer 7: drop-in OpenAI clients. `import updraft` imports this package, which loads `openai`, only on first use."""

from .client import AsyncOpenAI, OpenAI

__all__ = ["AsyncOpenAI", "OpenAI"]
