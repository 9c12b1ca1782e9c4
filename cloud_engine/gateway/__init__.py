"""The endpoint apps escalate to: keys, balancing, fail-over and metering in front of the nodes. Needs no torch."""

from .access.keys import new_key as new_key
from .process import GatewayOptions as GatewayOptions
from .process import run_gateway as run_gateway
