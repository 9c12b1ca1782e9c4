"""Layer 1: the OpenAI wire format and code that all layers share. Imports no other Updraft package."""
