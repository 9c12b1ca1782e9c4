"""Floor 7: drop-in OpenAI clients. Importing this loads `openai`, so `import updraft` does it only on first use."""

from .client import AsyncOpenAI, OpenAI

__all__ = ["AsyncOpenAI", "OpenAI"]
