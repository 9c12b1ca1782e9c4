"""The gateway: an HTTP server that authenticates and meters requests and balances them over nodes."""

from .access.database import KeyDatabase as KeyDatabase
from .access.database import NewKey as NewKey
from .process import GatewayOptions as GatewayOptions
from .process import run_gateway as run_gateway
