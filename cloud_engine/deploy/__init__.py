"""A gateway and its nodes from one YAML file: as Ray Serve deployments, or as plain processes of one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import CloudConfig as CloudConfig
from .config import read_config as read_config

if TYPE_CHECKING:
    from ray.serve import Application


def app(config: CloudConfig) -> Application:
    """For `ray.serve.run`, on a cluster of your own. Raises ConfigurationError or MissingDependencyError."""
    from .ray_cluster import application

    return application(config)
