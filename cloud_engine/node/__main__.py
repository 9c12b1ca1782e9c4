"""`python -m updraft.cloud_engine.node --model DIR`: one node from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ...protocol.http.server import run_main
from .process import NodeOptions, run_node


def _options() -> NodeOptions:
    parser = argparse.ArgumentParser(
        prog="python -m updraft.cloud_engine.node", description=__doc__, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of the model to serve, or owner/repo on a hub")
    add(
        "--draft",
        help="smaller model of the same vocabulary, for speculative decoding: a folder, a GGUF file, or a hub's",
    )
    add("--host")
    add("--port", type=int, help="0: any free port")
    add("--threads", type=int, help="torch threads")
    add("--max-batch-size", type=int, help="requests per step")
    add("--token-budget", type=int, help="tokens per step")
    add("--max-step-ms", type=int, help="how long the prompts of a step may take")
    add("--num-blocks", type=int, help="blocks of the KV cache")
    add("--default-max-tokens", type=int, help="most tokens of an answer whose request sets no max_tokens")
    add("--policy", choices=("fcfs", "priority", "shortest-prefill"), help="who goes first")
    add("--max-waiting", type=int, help="requests queued, beyond a full batch, before others are refused")
    add("--no-prefix-caching", dest="prefix_caching", action="store_false", help="compute every prompt anew")
    add("--num-draft-tokens", type=int, help="most tokens drafted per step and request")
    add("--ngram", action="store_true", help="also draft by looking up repetitions in prompt and answer")
    add("--device", help="cpu, cuda or cuda:NUMBER")
    add("--dtype", choices=("float32", "bfloat16"), help="of weights and KV cache")
    add("--block-size", type=int, help="tokens per block of the KV cache")
    add("--batch-invariant", action="store_true", help="the same bits whatever else is in the batch")
    add("--attention-backend", choices=("auto", "torch", "native", "triton"), help="what computes attention")
    add("--no-cuda-graphs", dest="cuda_graphs", action="store_false", help="launch every kernel by itself")
    add("--restart", action="store_true", help="start the engine anew when its process dies")
    add("--drain-seconds", type=float, help="what requests in flight get to finish on SIGTERM")
    add("--tool-parser", help="how the model writes tool calls: auto, hermes, llama3, mistral or mistral-args")
    add("--allowed-host", dest="allowed_hosts", action="append", help="a name that callers may use; once for each")
    add("--allowed-origin", dest="allowed_origins", action="append", help="a web page's origin to let in")
    add("--ready-file", type=Path, help="file to write the URL to once requests are accepted")
    add("--exit-with-parent", action="store_true", help="stop when the process that started this one is gone")
    return NodeOptions(**vars(parser.parse_args()), api_key=os.environ.get("UPDRAFT_NODE_API_KEY") or None)


if __name__ == "__main__":
    sys.exit(run_main(lambda: run_node(_options())))
