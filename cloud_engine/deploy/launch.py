"""`python -m updraft.cloud_engine.deploy.launch gateway|node`: run a server with JSON options from standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import UpdraftError


def main() -> None:
    options = sys.stdin.buffer.read()
    try:
        if sys.argv[1] == "node":
            from ..node.process import NodeOptions, run_node

            run_node(msgspec.json.decode(options, type=NodeOptions, dec_hook=_path))
        else:
            from ..gateway.process import GatewayOptions, run_gateway

            run_gateway(msgspec.json.decode(options, type=GatewayOptions, dec_hook=_path))
    except UpdraftError as error:
        sys.exit(f"error: {error.message}")


def _path(kind: type, value: Any) -> Any:
    return kind(value) if issubclass(kind, Path) else value


if __name__ == "__main__":
    main()
