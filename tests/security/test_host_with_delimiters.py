"""A Host that holds `/`, `?`, `#`, `@` or a second name is refused: no URL is ever built from it."""

from __future__ import annotations

from typing import Any

import pytest
from raw_http import status_of

BODY = b'{"model": "echo", "messages": [{"role": "user", "content": "hi"}]}'


@pytest.mark.parametrize(
    "host",
    [
        "localhost/admin/usage?", "localhost?x=", "localhost#", "localhost/../admin", "evil.example/localhost",
        "localhost@evil.example", "evil.example@localhost", "localhost:80@evil.example", "localhost:evil", "",
        "localhost, evil.example", "localhost\\evil.example", "[localhost]", "[::1", "localhost%2fadmin", "127.1",
        "2130706433", "0x7f.1", "localhost.", "evil.example",
    ],
)  # fmt: skip
def test_no_other_host_is_served(gateway: Any, host: str) -> None:
    assert status_of(gateway.sent(BODY, host=host)) in (400, 403)
    assert status_of(gateway.sent(BODY, host="LOCALHOST:1")) == 200


def test_two_hosts_are_refused(gateway: Any) -> None:
    assert status_of(gateway.sent(BODY, "host: evil.example")) in (400, 403)
