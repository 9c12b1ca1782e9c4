"""Headers, queries and paths of OpenAI's API and of Azure's; and which provider a name or a host means."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from scripted_provider import Ask, ScriptedProvider
from updraft.cli.shared import options
from updraft.protocol.errors import ConfigurationError
from updraft.router.config import RouterConfig
from updraft.router.settings_sources import load_config
from updraft.router.tiers.failures import CloudFailure
from updraft.router.tiers.providers import registry
from updraft.router.tiers.providers.provider import OpenAIProvider

DONE: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}


def test_headers_and_query_go_with_every_request(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(DONE)
    settings = {"cloud_headers": {"OpenAI-Organization": "org-1"}, "cloud_query": {"tier": "a b"}}
    assert ask(settings, seed=3, whatever=1) == DONE
    (asked,) = provider.asked
    assert asked.path == "/v1/chat/completions?tier=a+b"
    assert (asked.headers["authorization"], asked.headers["openai-organization"]) == ("Bearer sk-secret-1", "org-1")
    assert asked.body["whatever"] == 1, "the server judges what it does not know"


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ({}, "/openai/v1/chat/completions"),
        ({"api-version": "2024-10-21"}, "/openai/deployments/my%20gpt/chat/completions?api-version=2024-10-21"),
    ],
)
def test_azures_paths(provider: ScriptedProvider, ask: Ask, query: dict[str, str], path: str) -> None:
    provider.says(DONE)
    ask({"cloud_provider": "azure", "cloud_model": "my gpt", "cloud_query": query})
    (asked,) = provider.asked
    assert (asked.path, asked.headers["api-key"]) == (path, "sk-secret-1")
    assert "authorization" not in asked.headers


def test_secret_header_is_redacted(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says({"error": {"message": "Bad x-token: tok-secret-2"}}, 403)
    with pytest.raises(CloudFailure) as raised:
        ask({"cloud_headers": {"X-Token": "tok-secret-2"}})
    assert "secret" not in raised.value.error.message
    config = RouterConfig(cloud_url="http://h", cloud_model="m", cloud_headers={"X-Token": "tok-secret-2"})
    assert "secret" not in repr(config)


@pytest.mark.parametrize("name", ["Host", "content-length", "bad name", "x-a\n"])
def test_headers_that_cannot_be_sent(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cloud_headers"):
        RouterConfig(cloud_url="http://h", cloud_model="m", cloud_headers={name: "v"})


@pytest.mark.parametrize(
    ("url", "name", "base"),
    [
        ("https://api.anthropic.com", "anthropic", "https://api.anthropic.com/v1"),
        (
            "https://generativelanguage.googleapis.com",
            "gemini",
            "https://generativelanguage.googleapis.com/v1beta",
        ),
        (
            "https://generativelanguage.googleapis.com/v1beta/openai",
            "openai",
            "https://generativelanguage.googleapis.com/v1beta/openai",
        ),
        ("https://me.openai.azure.com", "azure", "https://me.openai.azure.com/openai/v1"),
        ("https://api.openai.com", "openai", "https://api.openai.com/v1"),
        ("https://api.anthropic.com.evil.example", "openai", "https://api.anthropic.com.evil.example/v1"),
    ],
)
def test_the_provider_of_a_host(url: str, name: str, base: str) -> None:
    assert registry.provider_of("auto", url).name == name
    assert RouterConfig(cloud_url=url, cloud_model="m").cloud_url == base


class Echo(OpenAIProvider):
    name = "echo"


def test_a_package_adds_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    there = EntryPoints(
        [
            EntryPoint("echo", f"{__name__}:Echo", registry.GROUP),
            EntryPoint("wrong", "pathlib:Path", registry.GROUP),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", there.select)
    assert isinstance(registry.provider_of("echo", "http://entry"), Echo)
    with pytest.raises(ConfigurationError, match="not a subclass"):
        registry.provider_of("wrong", "http://entry")
    with pytest.raises(ConfigurationError, match="echo, gemini, openai"):
        registry.provider_of("moon", "http://entry")


def test_another_url_takes_no_headers_along(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'cloud_url = "https://a.example"\ncloud_model = "m"\ncloud_provider = "anthropic"\n'
        'cloud_headers = { X-Key = "secret" }\n'
    )
    same = load_config(environ={}, file=file)
    assert (same.cloud_provider, same.cloud_headers) == ("anthropic", {"X-Key": "secret"})
    other = load_config(environ={"UPDRAFT_CLOUD_URL": "https://b.example"}, file=file)
    assert (other.cloud_provider, other.cloud_headers) == ("auto", {})
    given = load_config(environ={"UPDRAFT_CLOUD_QUERY": "api-version=1, a=b"}, file=file)
    assert given.cloud_query == {"api-version": "1", "a": "b"}
    with pytest.raises(ConfigurationError, match="name=value"):
        load_config(environ={"UPDRAFT_CLOUD_HEADERS": "word"}, file=file)


def test_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    pair = options.Pair(local="ollama:qwen3", cloud_url="https://h", cloud_model="m", cloud_provider="gemini")
    config = pair.config()
    assert (config.local, config.cloud_url) == ("ollama:qwen3", "https://h/v1beta")
