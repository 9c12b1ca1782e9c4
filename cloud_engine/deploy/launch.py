"""`python -m updraft.cloud_engine.deploy.launch gateway|node`: runs it with the options on standard input, in JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import UpdraftError


def main() -> None:
    if sys.argv[1] == "node":
        from ..node.process import NodeOptions as Options
        from ..node.process import run_node as run
    else:
        from ..gateway.process import GatewayOptions as Options
        from ..gateway.process import run_gateway as run
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=Options, dec_hook=_path)
    try:
        run(options)
    except UpdraftError as error:
        sys.exit(f"error: {error.message}")


def _path(kind: type, value: Any) -> Any:
    return kind(value) if issubclass(kind, Path) else value


if __name__ == "__main__":
    main()
