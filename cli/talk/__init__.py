"""Commands that talk to the models: `updraft ask` and `updraft chat`."""
