"""The autoscaler. Ray copies this module into its controller, so it must not import other Updraft modules."""

from __future__ import annotations

from typing import Any


class LoadAutoscaler:
    """Chooses the number of nodes for Ray, such that requests and KV usage per node meet their targets.

    Ray itself applies the delays and the bounds. `context` is Ray's `AutoscalingContext`.
    """

    def __init__(self, requests: float, kv_usage: float) -> None:
        self._targets = {"requests": requests, "kv_usage": kv_usage}

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        loads = [sum(metrics[name].values()) / target for name, target in self._targets.items() if metrics.get(name)]
        return max(1.0, *loads) if loads else context.target_num_replicas, {}
