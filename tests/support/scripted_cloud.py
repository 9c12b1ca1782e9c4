"""Scripted replies of the fake cloud: a whole completion, or a stream of chunks."""

from __future__ import annotations

import json
from typing import Any

from router_fakes import FakeCloud


def cloud_says(cloud: FakeCloud, message: dict[str, Any], finish_reason: str = "stop") -> None:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2}}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    cloud.says = (200, json.dumps(body).encode())


def cloud_streams(cloud: FakeCloud, *deltas: dict[str, Any], finish_reason: str = "stop") -> None:
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish_reason})
    events = [b"data: " + json.dumps({**frame, "choices": [choice]}).encode() + b"\n\n" for choice in choices]
    cloud.says = (200, b"".join(events) + b"data: [DONE]\n\n")
