"""OpenAI's API, which most servers have, and Azure's variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from .provider import Capabilities, Provider, ProviderCall, with_query


class OpenAIProvider(Provider):
    """Any OpenAI-compatible server. Requests are not checked, since the server itself refuses unsupported fields."""

    name = "openai"
    capabilities = Capabilities(predictions=True, continuation=True, grammars=True, seeds=True)

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        return ProviderCall(with_query(path, query), body)


class AzureProvider(Provider):
    """Azure OpenAI. With `api-version` in the query, each model has a path; else OpenAI's paths below `/openai/v1`."""

    name = "azure"
    capabilities = Capabilities(predictions=True, seeds=True, lists_models=False)

    def base_path(self, query: Mapping[str, str]) -> str:
        return "/openai" if "api-version" in query else "/openai/v1"

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"api-key": api_key} if api_key else {}

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        self.check(path, body)
        if "api-version" in query:
            path = f"deployments/{quote(str(body.get('model', '')), safe='')}/{path}"
        return ProviderCall(with_query(path, query), body)
