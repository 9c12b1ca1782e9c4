"""All layers of a decoder, and several tokens, in one call of C."""
