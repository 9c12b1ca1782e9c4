"""Transports for libraries that accept an HTTP client: LangChain, LiteLLM, instructor, pydantic-ai and others."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import Any

from ..protocol.errors import ConfigurationError
from ..router.config import RouterConfig
from ..router.settings_checks import check_settings
from .client import settings_of
from .runtime_pool import RuntimeLease
from .transport import async_transport as async_transport_over
from .transport import httpx_of_openai, sync_transport

_NAMES = frozenset(field.name for field in fields(RouterConfig))


def transport(config: RouterConfig | None = None, *, httpx: ModuleType | None = None, **settings: Any) -> Any:
    """Return the router as a transport: `httpx2.Client(transport=updraft.transport(local="smollm2"))`.

    `settings`: fields of RouterConfig, which include the settings of `updraft.OpenAI`. `httpx` is the module `httpx` or
    `httpx2`, by default the module that the installed `openai` uses. Requests are answered in this process, and the
    host in their URL is ignored. No API key is needed, because a key only identifies the caller. Sync and async clients
    with equal settings share one router. Closing or deleting the last client closes the router.

    Raises ConfigurationError like `updraft.OpenAI`.
    """
    return sync_transport(httpx or httpx_of_openai(), _lease(config, settings))


def async_transport(config: RouterConfig | None = None, *, httpx: ModuleType | None = None, **settings: Any) -> Any:
    """Return the router as a transport for `httpx2.AsyncClient` or `httpx.AsyncClient`; see `transport`."""
    return async_transport_over(httpx or httpx_of_openai(), _lease(config, settings))


def _lease(config: RouterConfig | None, settings: dict[str, Any]) -> RuntimeLease:
    if unknown := settings.keys() - _NAMES:
        raise ConfigurationError(f"Unknown setting {min(unknown)!r}.", param=min(unknown))
    resolved = settings_of(config, settings)
    check_settings(resolved)
    return RuntimeLease(resolved)
