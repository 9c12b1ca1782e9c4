"""Late imports come without what they would bring along unasked."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS = """
import os
from updraft.classifier.optional_imports import load_onnxruntime
import numpy
before = len(os.listdir("/proc/self/task"))
load_onnxruntime()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_onnxruntime_starts_no_thread_that_reports_to_its_maker() -> None:
    pytest.importorskip("onnxruntime", reason="needs the [edge] extra")
    done = subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0"
