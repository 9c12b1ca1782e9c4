"""Translations between OpenAI chat completions and the APIs of Anthropic, OpenAI Responses and Ollama; form parser."""
