"""Floor 7: drop-in OpenAI clients: the genuine `openai` classes over our transport."""
