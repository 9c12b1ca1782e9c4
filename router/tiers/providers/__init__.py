"""APIs of clouds: the capabilities of each provider, and translation from and to OpenAI's chat completions."""
