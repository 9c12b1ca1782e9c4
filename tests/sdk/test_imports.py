"""What importing costs, measured in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "llama_cpp", "openai", "onnxruntime", "sklearn", "transformers")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_updraft_is_light() -> None:
    code = "import time; t = time.perf_counter(); import updraft; d = time.perf_counter() - t; import sys; print(d)"
    fresh(code)  # compile the bytecode first
    fastest = min(float(fresh(code)) for _ in range(3))
    assert fastest < 0.3
    loaded = fresh("import sys, updraft; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("module", ["updraft.sdk", "updraft.router.router", "updraft.router.daemon"])
def test_the_router_needs_no_engine(module: str) -> None:
    loaded = set(fresh(f"import sys, {module}; print(*sys.modules)").split())
    assert not loaded & {"torch", "llama_cpp", "onnxruntime", "sklearn", "transformers"}


def test_both_classes_resolve_lazily() -> None:
    assert fresh("import updraft; print(updraft.OpenAI.__mro__[1].__module__, updraft.AsyncOpenAI)").startswith(
        "openai"
    )
