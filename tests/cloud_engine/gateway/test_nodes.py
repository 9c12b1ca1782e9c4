"""The gateway's reading of a node's URL and its list of models."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from updraft.cloud_engine.gateway.balancing.node import Model, Node, NodeAddress
from updraft.cloud_engine.gateway.balancing.registry import NodeRegistry
from updraft.cloud_engine.gateway.relay.continuation import PartialAnswer
from updraft.cloud_engine.gateway.upstream.client import Upstream
from updraft.cloud_engine.gateway.upstream.failures import UpstreamFailure
from updraft.protocol.errors import ConfigurationError, ModelNotFoundError, OverloadedError
from updraft.protocol.responses import Usage


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:abc", "http://[::1", "h:80", "ftp://h", "http://", ""])
def test_an_unusable_url_is_refused_in_words(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--nodes-file.* is not an http") as caught:
        Node(NodeAddress(url))
    assert caught.value.param == "node"


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://127.0.0.1:8000/", b"127.0.0.1:8000", b""),
        ("https://h/v1", b"h:443", b""),
        ("http://h/deep/v1/", b"h:80", b"/deep"),
        ("http://[::1]:8000", b"[::1]:8000", b""),
    ],
)
def test_node_addresses(url: str, authority: bytes, prefix: bytes) -> None:
    target = Node(NodeAddress(url)).target
    assert (target.authority, target.prefix) == (authority, prefix)
    assert b"[" not in target.host, "the address is for the connection"


def test_nodes_that_report_running_usage() -> None:
    node = Node(NodeAddress("http://h"))
    for owner, tells in (("updraft", True), ("vllm", True), ("openai", False), (None, False)):
        node.serves([msgspec.convert({"id": "m", "owned_by": owner}, Model)])
        assert (node.models, node.tells_usage) == (("m",), tells)


def test_unlisted_model_is_unknown_after_all_probes() -> None:
    registry = NodeRegistry([NodeAddress("http://a"), NodeAddress("http://b")], Upstream(None))
    first, second = registry.nodes
    first.serves([Model("m")])
    assert isinstance(registry.refusal("n"), OverloadedError)
    second.serves([Model("m")])
    assert isinstance(registry.refusal("n"), ModelNotFoundError)
    second.failed("gone")
    assert isinstance(registry.refusal("n"), ModelNotFoundError)


@pytest.mark.parametrize(
    "listed", [b'{"data":[{"id":"\xff"}]}', b'{"data":[{"id":"m","created":' + b"[" * 100_000, b"no"]
)
def test_a_list_of_models_that_is_no_json_fails_the_node_alone(listed: bytes) -> None:
    async def models(_request: Request) -> Response:
        return Response(listed)

    async def run(url: str) -> None:
        upstream = Upstream(None)
        registry = NodeRegistry([NodeAddress(url)], upstream)
        await registry.start()
        assert not registry.nodes[0].healthy
        assert registry.nodes[0].breaker.reason != "no probe has succeeded yet"
        await registry.close()
        await upstream.close()
        await asyncio.sleep(0)

    with serving(Starlette(routes=[Route("/v1/models", models)])) as url:
        asyncio.run(run(url))


@pytest.mark.parametrize("fault", [b"\xff", b'"'])
def test_events_that_are_no_json_stop_no_stream(fault: bytes) -> None:
    """The client gets such events unchanged. A node that continues a stream must not send any."""
    event = b'data: {"choices":[{"delta":{"content":"' + fault + b'"}}]}'
    begun = PartialAnswer(b"/v1/chat/completions", b'{"model":"m","messages":[]}')
    assert begun.read(event) == event
    assert begun.ending(Usage.of(1, 1)).endswith(b"data: [DONE]\n\n")
    again = PartialAnswer(b"/v1/chat/completions", b'{"model":"m","messages":[]}')
    assert again.continued((1, 1, 0), takes_tokens=False, takes_text=True) is not None
    with pytest.raises(UpstreamFailure, match="not valid JSON"):
        again.read(event)


def test_continuing_node_may_split_an_emoji() -> None:
    begun = PartialAnswer(b"/v1/chat/completions", b'{"model":"m","messages":[]}')
    assert begun.continued((1, 1, 0), takes_tokens=False, takes_text=True) is not None
    said = ""
    for half in (r"\ud83d", r"\ude00"):
        event = begun.read(b'data: {"choices":[{"delta":{"content":"' + half.encode() + b'"}}]}')
        assert event is not None
        said += json.loads(event[6:])["choices"][0]["delta"]["content"]
    assert said.encode("utf-16", "surrogatepass").decode("utf-16") == "\U0001f600"


@pytest.mark.parametrize("cached", [0, 6])
def test_a_continued_stream_has_the_cached_tokens_of_its_first_node(cached: int) -> None:
    """The continuing node may have read the whole prompt from its cache. No node has counted the whole prediction."""
    begun = PartialAnswer(b"/v1/chat/completions", b'{"model":"m","messages":[]}')
    assert begun.continued((9, 3, cached), takes_tokens=False, takes_text=True) is not None
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 40, "reasoning_tokens": 0}
    usage = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 12}}
    usage["completion_tokens_details"] = details
    event = begun.read(b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
    assert event is not None
    assert json.loads(event[6:])["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
