"""Chat completions, whole and as stream chunks, and random JSON that only resembles them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(max_size=8)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=4), TEXTS), max_size=3)
REASONS = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "index", "content", "tool_calls", "function", "logprobs", "usage", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def completion(reasoning: str, content: str, calls: list[tuple[str, str]], finish_reason: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def chunks_of(whole: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Return the chunks in which a server would stream the completion `whole`, with `size` characters each."""
    choice = whole["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: text[begin : begin + size]} for begin in range(0, len(text), size)]
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": arguments[begin : begin + size]}}]}
            for begin in range(0, len(arguments), size)
        ]
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return [*chunks, {**frame, "choices": [end]}, {**frame, "choices": [], "usage": whole["usage"]}]
