"""Web page of the daemon: static files and the endpoints of its six views."""
