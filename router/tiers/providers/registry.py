"""The provider that a name or a URL means. Packages add others as entry points of the group `updraft.providers`."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

import httpx

from ....protocol.errors import ConfigurationError
from .anthropic import AnthropicProvider
from .gemini import GeminiProvider
from .openai import AzureProvider, OpenAIProvider
from .provider import Provider

GROUP = "updraft.providers"
_BUILT_IN: dict[str, type[Provider]] = {
    kind.name: kind for kind in (OpenAIProvider, AzureProvider, AnthropicProvider, GeminiProvider)
}


@lru_cache(64)
def provider_of(name: str, url: str) -> Provider:
    """The provider of this name; `auto` goes by the host of the URL. Raises ConfigurationError."""
    name = _by_url(httpx.URL(url)) if name == "auto" else name
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    found = entry_points(group=GROUP, name=name)
    if not found:
        known = sorted({*_BUILT_IN, *entry_points(group=GROUP).names})
        raise ConfigurationError(
            f"cloud_provider {name[:100]!r} is unknown: it must be auto, {', '.join(known)}.", param="cloud_provider"
        )
    made = next(iter(found)).load()()
    if not isinstance(made, Provider):
        raise ConfigurationError(
            f"The entry point {name!r} of {GROUP} is no subclass of updraft.router.tiers.providers.provider.Provider.",
            param="cloud_provider",
        )
    return made


def _by_url(url: httpx.URL) -> str:
    """Google's and Anthropic's own hosts speak their own APIs, but for the path of Google's OpenAI-compatible one."""
    if url.host == "api.anthropic.com":
        return AnthropicProvider.name
    if url.host == "generativelanguage.googleapis.com" and "/openai" not in url.path:
        return GeminiProvider.name
    return AzureProvider.name if url.host.endswith(".openai.azure.com") else OpenAIProvider.name
