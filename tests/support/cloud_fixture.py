"""The fake cloud as a fixture: one server per test module, reset at the start of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_fakes import FakeCloud, running_cloud

__all__ = ["cloud", "cloud_server"]


@pytest.fixture(scope="module")
def cloud_server() -> Iterator[FakeCloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(cloud_server: FakeCloud) -> FakeCloud:
    """Return the module's cloud, reset: healthy, and without recorded requests."""
    cloud_server.mode = "healthy"
    cloud_server.requests.clear()
    cloud_server.authorizations.clear()
    cloud_server.disconnects = 0
    cloud_server.fail_after = None
    cloud_server.delay_s = 0.0
    cloud_server.says = None
    cloud_server.owner = "updraft"
    cloud_server.asked_for_models = 0
    cloud_server.headers = {}
    return cloud_server
