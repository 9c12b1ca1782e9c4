"""Code that comes along with a model is never run, whatever its `auto_map` says."""

from __future__ import annotations

from typing import Any


def test_a_model_with_code_is_served_without_it(node: Any) -> None:
    answer = node.complete()
    assert answer.status_code == 200, answer.text
    assert not node.canary.exists()
