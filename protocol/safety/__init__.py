"""Protection from the input of strangers, other users of the machine, and planted files."""
