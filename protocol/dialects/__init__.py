"""Other ways to ask for a chat completion and to tell its answer, as pure translations."""
