"""The endpoint apps escalate to: keys, balancing, fail-over and metering in front of the nodes."""
