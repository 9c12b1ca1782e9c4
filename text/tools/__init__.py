"""Tool calls in an answer's text, in the formats that models were trained on."""
