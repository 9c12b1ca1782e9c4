"""`updraft serve`, `node`, `gateway`, `gateway-key`: the long-running processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")]
ReadyFile = Annotated[Path | None, typer.Option(metavar="PATH", help="Write the address here once requests are taken.")]


def serve(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = options.SERVE_PORT,
    ready_file: ReadyFile = None,
    local: options.Local = None,
    cloud: options.Cloud = None,
    cloud_model: options.CloudModel = None,
    cloud_key_env: options.CloudKeyEnv = None,
    quality: options.Quality = None,
) -> None:
    """Run the router as a local OpenAI server, so that any app can use it without a change of code.

    Point an OpenAI client at the printed address + /v1, with any key, and model="auto", "local" or "cloud".

    \b
    Examples
      updraft serve
      updraft serve --local model.gguf --cloud https://host/v1 --cloud-model big --cloud-key-env HOST_KEY
      curl http://127.0.0.1:8790/v1/chat/completions -H 'content-type: application/json' \\
          -d '{"model": "auto", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    """


def node() -> None:
    """x"""


def gateway() -> None:
    """x"""


def gateway_key() -> None:
    """x"""
