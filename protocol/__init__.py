"""Layer 1: the OpenAI wire format and the code that every other layer shares. Imports no other package of Updraft."""
