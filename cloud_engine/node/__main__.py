"""`python -m updraft.cloud_engine.node --model DIR`: one node from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...protocol.server import run_main
from .process import NodeOptions, run_node


def _options() -> NodeOptions:
    parser = argparse.ArgumentParser(prog="python -m updraft.cloud_engine.node", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face style folder of the model to serve")
    add("--draft", type=Path, help="folder of a smaller model with the same vocabulary, for speculative decoding")
    add("--host", default=NodeOptions.host)
    add("--port", type=int, default=NodeOptions.port, help="0: any free port")
    add("--threads", type=int, help="torch threads")
    add("--max-batch-size", type=int, default=NodeOptions.max_batch_size, help="requests per step")
    add("--token-budget", type=int, default=NodeOptions.token_budget, help="tokens per step")
    add("--num-blocks", type=int, help="blocks of the KV cache")
    add("--num-draft-tokens", type=int, default=NodeOptions.num_draft_tokens, help="tokens drafted per step")
    add("--device", default=NodeOptions.device, help="cpu or cuda")
    add("--ready-file", type=Path, help="file to write the URL to once requests are accepted")
    add("--exit-with-parent", action="store_true", help="stop when the process that started this one is gone")
    return NodeOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(lambda: run_node(_options())))
