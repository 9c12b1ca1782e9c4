"""From a row of logits to a token, and what the row tells about confidence."""
