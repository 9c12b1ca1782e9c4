"""The endpoint that apps escalate to: keys, balancing, fail-over and metering in front of the nodes. Needs no torch."""

from .access.database import KeyDatabase as KeyDatabase
from .access.database import NewKey as NewKey
from .process import GatewayOptions as GatewayOptions
from .process import run_gateway as run_gateway
