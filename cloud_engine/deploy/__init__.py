"""Deployment of a gateway and its nodes from one YAML file: on Ray Serve, or as processes on one machine."""

from __future__ import annotations

from typing import Any

from .config import CloudConfig as CloudConfig
from .config import read_config as read_config


def app(config: CloudConfig) -> Any:
    """Return the Ray Serve application, for `ray.serve.run` on your own cluster.

    Raises ConfigurationError, or MissingDependencyError without Ray.
    """
    from .ray_cluster import application

    return application(config)
