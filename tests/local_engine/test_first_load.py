"""llama.cpp is loaded once in a process, whichever threads come first, and its log is ours for good."""

import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

AT_ONCE = """
import gc, sys, threading
from pathlib import Path
from updraft.local_engine.llama.library import LlamaModel, llama
from updraft.protocol.errors import ModelLoadError

libraries, together = [], threading.Barrier(6)
def load():
    together.wait()
    libraries.append(llama())
threads = [threading.Thread(target=load) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
objects = len(set(map(id, libraries)))
libraries.clear()
gc.collect()
try:
    LlamaModel(Path(sys.argv[1]))
except ModelLoadError as error:  # with what llama.cpp logged
    print(objects, error)
"""

ANOTHER = """
import gc, sys
from pathlib import Path
from updraft.local_engine.llama.library import Llama, LlamaModel, llama
from updraft.protocol.errors import ModelLoadError

llama()
Llama()  # llama.cpp now logs to this instance
gc.collect()
try:
    LlamaModel(Path(sys.argv[1]))
except ModelLoadError as error:
    print(error)
"""


def printed(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_that_load_first_get_one_library(tmp_path):
    printed_lines = printed(AT_ONCE, str(tmp_path / "missing.gguf"))
    assert printed_lines.startswith("1 ")
    assert "failed to open" in printed_lines


def test_the_log_is_never_freed_under_llama_cpp(tmp_path):
    assert "missing.gguf" in printed(ANOTHER, str(tmp_path / "missing.gguf"))
