"""`python -m updraft.cloud_engine.gateway --node URL --keys FILE --db FILE`: the gateway from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ...protocol.http.server import run_main
from .process import GatewayOptions, run_gateway


def _options() -> GatewayOptions:
    parser = argparse.ArgumentParser(
        prog="python -m updraft.cloud_engine.gateway", description=__doc__, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--node", dest="nodes", action="append", required=True, metavar="URL", help="a node; once for each of them")
    add("--db", type=Path, required=True, help="SQLite file for the usage rows")
    add("--keys", type=Path, help="file of name:sha256hex lines")
    add("--no-auth", action="store_true", help="take requests without a key; loopback only")
    add("--host")
    add("--port", type=int, help="0: any free port")
    add("--timeout-s", type=float, help="limit of a whole request, in seconds")
    add("--allowed-host", dest="allowed_hosts", action="append", help="a name that callers may use; once for each")
    add("--allowed-origin", dest="allowed_origins", action="append", help="a web page's origin to let in")
    add("--ready-file", type=Path, help="file to write the URL to once requests are accepted")
    add("--exit-with-parent", action="store_true", help="stop when the process that started this one is gone")
    chosen = vars(parser.parse_args())
    return GatewayOptions(**chosen, node_api_key=os.environ.get("UPDRAFT_NODE_API_KEY"))


if __name__ == "__main__":
    sys.exit(run_main(lambda: run_gateway(_options())))
