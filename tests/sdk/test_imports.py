"""The cost of imports, measured in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "llama_cpp", "openai", "onnxruntime", "sklearn", "transformers")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_updraft_is_light() -> None:
    # Processor time: the wall clock of a busy machine measures its other guests.
    code = "import time; t = time.process_time(); import updraft; print(time.process_time() - t)"
    fresh(code)  # compile the bytecode first
    fastest = min(float(fresh(code)) for _ in range(3))
    assert fastest < 0.3
    loaded = fresh("import sys, updraft; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_sdk_router_and_daemon_need_no_engine() -> None:
    code = "import sys, updraft, updraft.router.server.app; updraft.OpenAI, updraft.AsyncOpenAI; print(*sys.modules)"
    loaded = set(fresh(code).split())
    assert "openai" in loaded
    assert not loaded & {"torch", "llama_cpp", "onnxruntime", "sklearn", "transformers"}
