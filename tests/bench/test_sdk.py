"""The SDK's benchmark, small: both ways are asked, whole and streamed, with and without a ledger."""

from __future__ import annotations

from updraft.bench.sdk import measure


def test_every_way_is_timed() -> None:
    times = measure(2)
    kinds = [f"{way}{kind}" for way in ("instant", "sdk", "sdk_ledger") for kind in ("", "_stream")]
    assert sorted(times) == sorted(kinds)
    for name, figures in times.items():
        assert 0 < figures["p10_ms"] <= figures["p50_ms"] <= figures["p95_ms"]
        assert ("added_p50_ms" in figures) == name.startswith("sdk")
