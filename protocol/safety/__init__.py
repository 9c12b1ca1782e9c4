"""Protection from untrusted input, other users of the machine, and planted files."""
