"""Transports for libraries that take an HTTP client: LangChain, LiteLLM, instructor, pydantic-ai and others."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import Any

from ..protocol.errors import ConfigurationError
from ..router.config import RouterConfig
from ..router.settings_checks import check_settings
from .client import settings_of
from .sharing import RuntimeLease
from .transport import async_transport as async_transport_over
from .transport import httpx_of_openai, sync_transport

_NAMES = frozenset(field.name for field in fields(RouterConfig))


def transport(config: RouterConfig | None = None, *, httpx: ModuleType | None = None, **settings: Any) -> Any:
    """The router as a transport: `httpx2.Client(transport=updraft.transport(local="smollm2"))`.

    `settings` are those of `updraft.OpenAI`, and every other one of RouterConfig. `httpx` is the module `httpx` or
    `httpx2`; without it the one that the installed `openai` is built on. Whatever the host of a request's URL, its path
    is answered in this process. No API key is needed: a key of the library only tells callers apart. Clients with equal
    settings share one router, also with those of `async_transport`. Closing or losing the last one closes it.

    Raises ConfigurationError as `updraft.OpenAI` does.
    """
    return sync_transport(httpx or httpx_of_openai(), _lease(config, settings))


def async_transport(config: RouterConfig | None = None, *, httpx: ModuleType | None = None, **settings: Any) -> Any:
    """The same for `httpx2.AsyncClient` or `httpx.AsyncClient`; see `transport`."""
    return async_transport_over(httpx or httpx_of_openai(), _lease(config, settings))


def _lease(config: RouterConfig | None, settings: dict[str, Any]) -> RuntimeLease:
    if unknown := settings.keys() - _NAMES:
        raise ConfigurationError(f"There is no setting {min(unknown)!r}.", param=min(unknown))
    found = settings_of(config, settings)
    check_settings(found)
    return RuntimeLease(found)
