"""A cloud's refusal as the caller sees it: its status, its words, and whether another try may help."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from updraft.router.tiers.failures import CloudFailure, refused, reported, unreachable

URL = "https://cloud.example/v1"


def body_of(failure: CloudFailure) -> dict[str, Any]:
    return failure.error.to_body()["error"]


OPENAI = {"message": "No such model.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, {"error": {**OPENAI, "innererror": {"id": 7}}}, {**OPENAI, "innererror": {"id": 7}}),
        (
            404,
            {"object": "error", "message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404},
            {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": None, "code": 404},
        ),
        (
            422,
            {"detail": [{"type": "missing", "loc": ["body", "messages", 0, "content"], "msg": "Field required"}]},
            {"message": "body.messages.0.content: Field required", "type": "invalid_request_error"},
        ),
        (403, {"detail": "Not yours."}, {"message": "Not yours.", "type": "permission_error"}),
        (400, {"error": "model is required"}, {"message": "model is required", "type": "invalid_request_error"}),
        (
            401,
            b"Who are you?",
            {"message": f"The cloud at {URL} answered 401: Who are you?", "code": "invalid_api_key"},
        ),
        (
            502,
            b"<html><style>p {}</style><h1>502\nBad Gateway</h1></html>",
            {"message": f"The cloud at {URL} answered 502: 502 Bad Gateway", "type": "upstream_error"},
        ),
        (500, b"", {"message": f"The cloud at {URL} answered 500."}),
        (
            429,
            {"error": {"message": None}},
            {"message": f"The cloud at {URL} answered 429.", "type": "rate_limit_error"},
        ),
        (400, b'\xef\xbb\xbf{"error": {"message": "With a mark."}}', {"message": "With a mark."}),
    ],
)
def test_a_servers_own_words_are_kept(status: int, body: Any, expected: dict[str, Any]) -> None:
    failure = refused(URL, status, {}, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert failure.error.status == failure.status == status
    assert body_of(failure).items() >= expected.items()
    assert body_of(failure).keys() >= {"message", "type", "param", "code"}


def test_a_long_body_is_shortened() -> None:
    assert len(body_of(refused(URL, 500, {}, b"no " * 100_000))["message"]) < 400
    long = json.dumps({"error": {"message": "no " * 100_000}}).encode()
    assert len(body_of(refused(URL, 500, {}, long))["message"]) < 3000
    assert "\x1b" not in body_of(refused(URL, 500, {}, b"\x1b]52;c;aGk=\x07 oh"))["message"]


@pytest.mark.parametrize(
    ("status", "kind", "transient"),
    [
        (400, "refused", False),
        (401, "refused", False),
        (402, "refused", False),
        (403, "refused", False),
        (404, "refused", False),
        (422, "refused", False),
        (409, "refused", True),
        (408, "unreachable", True),
        (429, "unreachable", True),
        (500, "unreachable", True),
        (503, "unreachable", True),
    ],
)
def test_transient_statuses(status: int, kind: str, transient: bool) -> None:
    failure = refused(URL, status, {}, b"{}")
    assert (failure.kind, failure.transient) == (kind, transient)
    assert failure.allows("any")
    assert failure.allows("unreachable") == (kind == "unreachable")
    assert not failure.allows("never")
    assert failure.error.headers()["x-should-retry"] == "false", "the router has done so"
    assert not refused(URL, status, {"x-should-retry": "false"}, b"{}").transient


@pytest.mark.parametrize("field", ["code", "type"])
def test_a_spent_account_is_no_busy_one(field: str) -> None:
    failure = refused(URL, 429, {}, json.dumps({"error": {"message": "Pay.", field: "insufficient_quota"}}).encode())
    assert (failure.kind, failure.transient) == ("refused", False)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": formatdate(time.time() + 90_000, usegmt=True)}, 90_000),
        ({"retry-after": formatdate(time.time() - 50, usegmt=True)}, 0),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date(headers: dict[str, str], seconds: float | None) -> None:
    failure = refused(URL, 429, headers, b"{}")
    assert failure.retry_after_s == (None if seconds is None else pytest.approx(seconds, rel=0.1))
    assert failure.error.headers().get("retry-after") == headers.get("retry-after")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_names_its_target(status: int) -> None:
    failure = refused(URL, status, {"location": "https://user:secret@elsewhere.example/v2/x?key=secret"}, b"")
    assert failure.kind == "refused"
    assert failure.error.status == 502, "a client would follow what looks like a redirect"
    assert "https://elsewhere.example/v2/x" in failure.error.message
    assert str(status) in failure.error.message
    assert "secret" not in failure.error.message
    assert f"{URL[:-3]}/v2" in refused(URL, status, {"location": "/v2"}, b"").error.message
    assert "unknown" in refused(URL, status, {}, b"").error.message


def test_an_error_in_a_stream_keeps_its_words() -> None:
    failure = reported(URL, {"message": "Too long.", "type": "BadRequestError", "code": 400})
    assert (failure.kind, failure.error.status, body_of(failure)["type"]) == ("refused", 400, "BadRequestError")
    failure = reported(URL, "out of memory")
    assert (failure.kind, failure.error.status, failure.error.message) == ("unreachable", 502, "out of memory")
    assert not failure.unbilled


def test_only_unsent_requests_are_certainly_free() -> None:
    assert unreachable(URL, httpx.ConnectError("refused")).unbilled
    assert not unreachable(URL, httpx.ReadError("reset")).unbilled
    assert refused(URL, 500, {}, b"").unbilled
