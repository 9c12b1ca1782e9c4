"""One request on its way: read, relayed to a node, answered, counted."""
