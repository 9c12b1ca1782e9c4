"""Providers by name or URL. Packages add providers with entry points in the group `updraft.providers`."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

import httpx

from ....protocol.errors import ConfigurationError
from .anthropic import AnthropicProvider
from .gemini import GeminiProvider
from .provider import AzureProvider, OpenAIProvider, Provider

GROUP = "updraft.providers"
_BUILT_IN: dict[str, type[Provider]] = {
    kind.name: kind for kind in (OpenAIProvider, AzureProvider, AnthropicProvider, GeminiProvider)
}


@lru_cache(64)
def provider_of(name: str, url: str) -> Provider:
    """Return the provider named `name`. For `auto`, the URL's host selects the provider. Raises ConfigurationError."""
    name = _by_url(httpx.URL(url)) if name == "auto" else name
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    matches = entry_points(group=GROUP, name=name)
    if not matches:
        known = sorted({*_BUILT_IN, *entry_points(group=GROUP).names})
        raise ConfigurationError(
            f"Unknown cloud_provider {name[:100]!r}. Known: auto, {', '.join(known)}.", param="cloud_provider"
        )
    made = next(iter(matches)).load()()
    if not isinstance(made, Provider):
        raise ConfigurationError(
            f"Entry point {name!r} of {GROUP} is not a subclass of updraft.router.tiers.providers.provider.Provider.",
            param="cloud_provider",
        )
    return made


def _by_url(url: httpx.URL) -> str:
    """Return the name of the provider at a URL. Unknown hosts count as OpenAI-compatible."""
    if url.host == "api.anthropic.com":
        return AnthropicProvider.name
    if url.host == "generativelanguage.googleapis.com" and "/openai" not in url.path:
        return GeminiProvider.name
    return AzureProvider.name if url.host.endswith(".openai.azure.com") else OpenAIProvider.name
