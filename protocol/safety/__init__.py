"""What keeps the input of strangers, other users of the machine, and planted files from doing harm."""
