"""The meaning of the options that commands share."""

from __future__ import annotations

import importlib.util

import pytest
from updraft.cli.shared.options import with_cloud
from updraft.router.config import RouterConfig


def test_without_torch_the_local_model_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    lines: list[str] = []
    with with_cloud(RouterConfig(local="pocket"), lines.append) as running:
        assert running.cloud_url is None
    assert len(lines) == 1
    assert "pip install '.[cloud]'" in lines[0]
