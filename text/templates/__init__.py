"""Chat templates: messages to prompt text, rendered as programs of strangers."""
