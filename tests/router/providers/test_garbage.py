"""Whatever a provider sends, its translation is a chat completion or chunks, and raises nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.accounting.reported_usage import ReportedUsage
from updraft.router.tiers.answer_shapes import completion_in, is_piece
from updraft.router.tiers.failures import CloudFailure
from updraft.router.tiers.providers.anthropic import AnthropicProvider
from updraft.router.tiers.providers.gemini import GeminiProvider
from updraft.router.tiers.providers.provider import Provider

_WORDS = {
    "anthropic": (
        *("type", "index", "content", "content_block", "delta", "message", "usage", "text", "thinking", "input", "id"),
        *("name", "stop_reason", "input_tokens", "output_tokens", "partial_json", "model"),
    ),
    "gemini": (
        *("candidates", "content", "parts", "text", "thought", "functionCall", "args", "name", "id", "finishReason"),
        *("index", "usageMetadata", "promptTokenCount", "promptFeedback", "blockReason", "thoughtSignature"),
    ),
}
_KINDS = (
    *("message", "message_start", "message_delta", "content_block_start", "content_block_delta", "content_block_stop"),
    *("text", "text_delta", "thinking_delta", "input_json_delta", "tool_use", "thinking", "STOP"),
)


def bodies(words: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=3) | st.sampled_from(_KINDS)
    names = st.sampled_from(words)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=8
    )
    return st.dictionaries(names, values, max_size=6)


@pytest.mark.parametrize("provider", [AnthropicProvider(), GeminiProvider()], ids=lambda each: each.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_answer_breaks_the_translation(provider: Provider, data: st.DataObject) -> None:
    drawn = bodies(_WORDS[provider.name])
    translate = provider.events()
    assert translate is not None
    for event in data.draw(st.lists(drawn, max_size=4)):
        for chunk in translate(event):
            msgspec.json.encode(chunk)
            assert all(is_piece(choice) for choice in chunk["choices"])
            assert "usage" not in chunk or ReportedUsage.of(chunk) is not None
    try:
        completion_in(json.dumps(data.draw(drawn)).encode(), "http://h", provider, lambda error: error)
    except CloudFailure as failure:
        assert failure.kind == "invalid_answer"
