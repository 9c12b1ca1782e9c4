"""Translations between OpenAI chat completions and other APIs: Anthropic Messages, OpenAI Responses, Ollama, forms."""
