"""Layer 7: drop-in OpenAI clients. Importing it loads `openai`, so `import updraft` does so only on first use."""

from .client import AsyncOpenAI, OpenAI

__all__ = ["AsyncOpenAI", "OpenAI"]
