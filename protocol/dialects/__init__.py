"""Translations between OpenAI chat completions and other APIs (Messages, Ollama, Responses), and a form parser."""
