"""A gateway and its nodes from one YAML file: as Ray Serve deployments, or as plain processes of one machine."""

from __future__ import annotations

from typing import Any

from .config import CloudConfig as CloudConfig
from .config import read_config as read_config


def app(config: CloudConfig) -> Any:
    """The application for `ray.serve.run`, on a cluster of your own.

    Raises ConfigurationError, or MissingDependencyError without Ray.
    """
    from .ray_cluster import application

    return application(config)
