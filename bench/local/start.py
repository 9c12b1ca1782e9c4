"""`python -m updraft.bench.local.start FILE CONTEXT THREADS`: start time and memory of one model in a fresh process.

Prints "first token" as soon as it exists, then the process's memory in bytes with a full context.
"""

from __future__ import annotations

import sys

from ...local_engine.engine import LocalEngine, LocalOptions
from ...protocol.sampling import SamplingParams


def main(path: str, context_length: int, threads: int) -> None:
    options = LocalOptions(max_model_len=context_length, threads=threads, kv_cache_type="f16")
    with LocalEngine.load(path, options) as engine:
        next(engine.start_text("0123456789", SamplingParams(max_tokens=1, temperature=0)))
        _print("first token")
        fill = "3141592653" * (context_length // 10)
        next(engine.start_text(fill[: context_length - 1], SamplingParams(max_tokens=1, temperature=0)))
        import psutil  # imported late, to keep it out of the time to the first token

        _print(str(psutil.Process().memory_info().rss))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
