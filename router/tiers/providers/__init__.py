"""The APIs of clouds: each provider says what it can do, and translates from and to OpenAI's chat completions."""
