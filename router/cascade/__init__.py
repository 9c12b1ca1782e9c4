"""One request's way through the gates, and its way to the cloud."""
