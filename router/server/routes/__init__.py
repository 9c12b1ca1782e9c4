"""The endpoints of the router, one file each."""
