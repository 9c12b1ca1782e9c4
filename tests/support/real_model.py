"""SmolLM2, for tests that need a real model. `make test` fetches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FETCHED = Path(__file__).parents[2] / "out" / "models" / "smollm2.gguf"
SMOLLM2 = Path(os.environ.get("UPDRAFT_TEST_SMOLLM2") or _FETCHED)
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_file(), reason="SmolLM2 is missing: `make test` fetches it")
