"""Differences between the releases of the openai client that the SDK is built on."""

from __future__ import annotations

import openai
import pytest

#: Marks tests of a transport's errors: openai before version 3 wraps these errors in its own, and retries.
passes_errors_on = pytest.mark.skipif(
    int(openai.__version__.partition(".")[0]) < 3, reason="openai 2 wraps errors of the transport"
)
