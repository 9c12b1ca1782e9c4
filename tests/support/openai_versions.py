"""Differences between the releases of the openai client that the SDK is built on."""

from __future__ import annotations

import openai
import pytest

#: Releases before 3 wrap what a transport raises in errors of their own, and try again.
passes_errors_on = pytest.mark.skipif(
    int(openai.__version__.partition(".")[0]) < 3, reason="openai 2 wraps the errors of a transport"
)
