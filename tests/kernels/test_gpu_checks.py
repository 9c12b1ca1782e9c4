"""The GPU tests' checks of attention, on small batches in the interpreter: so they do run when there is one."""

from __future__ import annotations

import pytest
import torch
from attention_checks import Place, ReplayedAttention, attention_error
from updraft.kernels.attention import triton as paged_attention_triton
from updraft.kernels.attention.launch import AttentionShape

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")

PLACE = Place(torch.device("cpu"), torch.float32, torch.float32)
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16, block_size=16, cache_bytes=4)
MIXED = [(40, 1), (0, 20), (17, 6), (0, 0), (15, 1)]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_attention(window: int | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    assert attention_error(SHAPE, MIXED, PLACE, window, has_sinks=has_sinks) < 1e-5


def test_the_check_sees_an_error(monkeypatch) -> None:
    """Keys beyond the window, of which nobody should know."""
    attend = paged_attention_triton.attend

    def wider(query, cache, metadata, shape, rule):
        return attend(query, cache, metadata, shape, rule.__class__(rule.scale, rule.window + 1))

    torch.manual_seed(0)
    monkeypatch.setattr(paged_attention_triton, "attend", wider)
    assert attention_error(SHAPE, MIXED, PLACE, 9) > 0.01


def test_a_plan_that_is_exchanged() -> None:
    torch.manual_seed(0)
    replayed = ReplayedAttention(SHAPE, [(40, 1), (17, 1), (0, 1)], PLACE)
    for batch in (replayed.spans, replayed.spans[:1], replayed.spans[1:], []):
        replayed.plan(batch)
        assert replayed.error(replayed.compute(), batch) <= 1e-5
