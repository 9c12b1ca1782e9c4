"""The number of nodes that a model needs. Ray copies this module into its controller: it imports nothing of ours."""

from __future__ import annotations

from typing import Any


class LoadPolicy:
    """The nodes that bring requests and KV use per node to their targets. Ray adds delays and bounds.

    `context` is Ray's `AutoscalingContext`.
    """

    def __init__(self, requests: float, kv_usage: float) -> None:
        self._targets = {"requests": requests, "kv_usage": kv_usage}

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        loads = [sum(found[name].values()) / target for name, target in self._targets.items() if found.get(name)]
        return max(1.0, *loads) if loads else context.target_num_replicas, {}
