"""Fixtures of the SDK tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_fakes import FakeCloud, running_cloud


@pytest.fixture(scope="module")
def _cloud_server() -> Iterator[FakeCloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(_cloud_server: FakeCloud) -> FakeCloud:
    """A healthy cloud that has seen nothing yet."""
    _cloud_server.mode = "healthy"
    _cloud_server.requests.clear()
    _cloud_server.authorizations.clear()
    _cloud_server.disconnects = 0
    _cloud_server.fail_after = None
    return _cloud_server
