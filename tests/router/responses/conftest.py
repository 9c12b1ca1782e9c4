"""Fixtures of the tests of answers: a scripted cloud for each test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_provider import ScriptedProvider, running_provider


@pytest.fixture(scope="module")
def cloud() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider
