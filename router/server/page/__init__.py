"""The web page of the daemon: its files, and what its six views ask for."""
