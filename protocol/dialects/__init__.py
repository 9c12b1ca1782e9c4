"""Translations between OpenAI chat completions and Anthropic's, Ollama's and the Responses API; a parser of forms."""
