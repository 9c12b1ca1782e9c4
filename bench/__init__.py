"""Floor 8: `updraft bench ...`: every figure in the docs comes from here."""
