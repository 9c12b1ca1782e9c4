"""What a node's URL and its list of models tell the gateway."""

from __future__ import annotations

import msgspec
import pytest
from updraft.cloud_engine.gateway.balancing.node import Model, Node, NodeAddress
from updraft.cloud_engine.gateway.balancing.registry import NodeRegistry
from updraft.cloud_engine.gateway.upstream.client import Upstream
from updraft.protocol.errors import ConfigurationError, ModelNotFoundError, OverloadedError


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:abc", "http://[::1", "h:80", "ftp://h", "http://", ""])
def test_an_unusable_url_is_refused_in_words(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an http") as caught:
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
def test_where_a_node_is(url: str, authority: bytes, prefix: bytes) -> None:
    target = Node(NodeAddress(url)).target
    assert (target.authority, target.prefix) == (authority, prefix)
    assert b"[" not in target.host, "the address is for the connection"


def test_who_can_be_asked_for_running_usage() -> None:
    node = Node(NodeAddress("http://h"))
    for owner, tells in (("updraft", True), ("vllm", True), ("openai", False), (None, False)):
        node.serves([msgspec.convert({"id": "m", "owned_by": owner}, Model)])
        assert (node.models, node.tells_usage) == (("m",), tells)


def test_a_model_is_unknown_once_every_node_has_said_what_it_serves() -> None:
    registry = NodeRegistry([NodeAddress("http://a"), NodeAddress("http://b")], Upstream(None))
    first, second = registry.nodes
    first.serves([Model("m")])
    assert isinstance(registry.refusal("n"), OverloadedError)
    second.serves([Model("m")])
    assert isinstance(registry.refusal("n"), ModelNotFoundError)
    second.failed("gone")
    assert isinstance(registry.refusal("n"), ModelNotFoundError)
