"""The device that is used: it has to be there, and a numbered one becomes torch's current one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from updraft.cloud_engine.engine.worker.devices import allow_tf32, use_device
from updraft.protocol.errors import ConfigurationError


@pytest.fixture
def two_devices(monkeypatch) -> list[int]:
    """The device that would become the current one, on a machine that has two."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("name", "current"), [("cpu", []), ("cuda", []), ("cuda:0", [0]), ("cuda:1", [1])])
def test_a_numbered_one_becomes_the_current_one(name: str, current: list[int], two_devices: list[int]) -> None:
    use_device(name)
    assert two_devices == current


@pytest.mark.parametrize(("name", "allowed"), [("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_a_gpu_multiplies_float32_in_tf32(name: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(allow_tf32=False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    allow_tf32(name)
    assert settings.allow_tf32 == allowed


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:-1", "cuda:one", "cuda:2 ", "CPU", "", "cpu:0"])
def test_invalid_devices(name: str, two_devices: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="cpu, cuda or cuda:NUMBER") as caught:
        use_device(name)
    assert caught.value.param == "device" and not two_devices


def test_missing_device(two_devices: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="cuda:2 not found; torch sees 2 devices, from 0"):
        use_device("cuda:2")
    assert not two_devices


def test_none_at_all(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigurationError, match=r"finds no CUDA device here\. Use --device cpu"):
            use_device(name)
