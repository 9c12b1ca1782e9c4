"""Fixtures of the router tests."""

from __future__ import annotations

from cloud_fixture import cloud, cloud_server

__all__ = ["cloud", "cloud_server"]
