"""`updraft service`: the router in the background, from login on."""
