"""Processing of sampled tokens: answers grow, branch off and end."""
