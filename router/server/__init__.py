"""The router on a local OpenAI port, for apps in any language."""
