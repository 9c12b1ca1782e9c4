"""SIGINT as a shell hands it down: what it starts in the background without job control ignores it."""

from __future__ import annotations

import signal

import pytest

needs_sigint = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN, reason="started in the background, where SIGINT is ignored"
)
SIGINT = pytest.param(signal.SIGINT, marks=needs_sigint)
