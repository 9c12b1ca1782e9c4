"""One Redis server for the tests of each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import running_redis


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url
