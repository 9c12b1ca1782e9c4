"""Lines of the log: an object each where that is asked for, and no key, password or quoted prompt in any."""

from __future__ import annotations

import io
import json
import logging

import pytest
from updraft.protocol.telemetry import logs


@pytest.fixture
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The lines of a logger of its own, formatted as `log_to_stderr` would."""
    monkeypatch.setenv(logs.FORMAT_VARIABLE, request.param)
    root, stream = logging.Logger("root"), io.StringIO()
    monkeypatch.setattr(logging, "root", root)
    logs.log_to_stderr()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    root.error("the node said %s", "Authorization: Bearer canary-key and http://me:canary-password@host/")
    root.error("a key: %s", "sk-proj-canary" + "x" * 30)
    root.error("asked http://host/v1/chat?api-version=1&api-key=canary-query&x=1")
    try:
        raise ValueError("canary-prompt")
    except ValueError:
        root.exception("it failed")
    return stream


@pytest.mark.parametrize("written", ["json"], indirect=True)
def test_json_lines_hold_no_secret_and_no_message_of_an_exception(written: io.StringIO) -> None:
    first, second, asked, third = map(json.loads, written.getvalue().splitlines())
    assert first["message"] == "the node said Authorization: Bearer [redacted] and http://[redacted]@host/"
    assert second["message"] == "a key: sk-[redacted]"
    assert asked["message"] == "asked http://host/v1/chat?api-version=1&api-key=[redacted]&x=1"
    assert (third["level"], third["message"], third["exception"]) == ("error", "it failed", "ValueError")
    assert "raise ValueError" in third["stack"]
    assert first["time"].endswith("Z")
    assert "canary-prompt" not in third["stack"].replace('ValueError("canary-prompt")', "")


@pytest.mark.parametrize("written", ["text"], indirect=True)
def test_lines_for_people_hold_no_secret(written: io.StringIO) -> None:
    text = written.getvalue()
    assert "canary-key" not in text
    assert "canary-password" not in text
    assert "sk-proj" not in text
    assert "canary-query" not in text
    assert "it failed" in text
