"""Daemons without a local model, one per cloud API. One scripted provider is the cloud of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from router_fakes import tiers
from scripted_provider import ScriptedProvider
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app


@contextmanager
def running_daemons(cloud: ScriptedProvider, *names: str, **settings: Any) -> Iterator[dict[str, str]]:
    """Run a daemon for each API in `names`, and yield the daemons' URLs by API."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for name in names:
            key: dict[str, Any] = {"cloud_url": cloud.url, "cloud_model": "m", "cloud_api_key": "k"}
            config = RouterConfig(local=None, cloud_provider=name, ledger=None, **key, **settings)
            app = daemon_app(Router(config, tiers(None, config)))
            urls[name] = stack.enter_context(serving(app, lifespan=True))
        yield urls
