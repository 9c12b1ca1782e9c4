"""From logits to tokens: logit edits, truncation, sampling and probabilities."""
