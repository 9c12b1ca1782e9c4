"""Floor 1: the OpenAI wire and what every other floor shares. Imports nothing of ours."""
