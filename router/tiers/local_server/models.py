"""Models of a server: selection, capabilities and identity."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import httpx
import msgspec

from ....model_files.identity import SERVED, ModelIdentity
from ....protocol.errors import ModelLoadError
from ....protocol.http.foreign import error_in, json_of
from ...request.json_narrowing import table, tables
from .address import OLLAMA_PORT, ServerAddress
from .tokens import TOP, reported_in

_CONNECT_S = 2.0
_ANSWER_S = 300.0  # the server may have to load the model first
_CONTEXT = 4096  # tokens, if the server reports no context length
_WEIGHTS = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # reported by llama-server


@dataclass(frozen=True, slots=True)
class LocalServerModel:
    """A model on a local server."""

    address: ServerAddress
    name: str
    context_length: int
    # Whether the server reports log-probabilities.
    has_signals: bool
    # Identity, from the weights' details that the server reports.
    identity: ModelIdentity


def open_client() -> httpx.AsyncClient:
    """Return a client that ignores proxies and redirects, so that prompts reach only the configured server."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S), trust_env=False, follow_redirects=False
    )


async def find_model(client: httpx.AsyncClient, address: ServerAddress) -> LocalServerModel:
    """Select the model in the server's list and test it with a one-token request. Raises ModelLoadError."""
    cards = tables((await _json(client, address, "GET", "models")).get("data")) or []
    names = [str(card.get("id")) for card in cards]
    if address.model is None and len(names) != 1:
        listed = ", ".join(name[:100] for name in names[:20]) or "none"
        raise ModelLoadError(f"The local server at {address.url} has these models: {listed}. Set local_model to one.")
    name = address.model or names[0]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": TOP,
    }
    choices = tables((await _json(client, address, "POST", "chat/completions", body)).get("choices")) or [{}]
    card = next((card for card in cards if card.get("id") == name), dict[str, Any]())
    identity = await _identity(client, address, name, card)
    return LocalServerModel(address, name, _context(card), bool(reported_in(choices[0])), identity)


def _context(card: dict[str, Any]) -> int:
    """Return the context length as reported by vLLM, Updraft or llama-server."""
    meta = table(card.get("meta")) or {}
    for value in (card.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and 0 < value < 2**31:
            return value
    return _CONTEXT


async def _identity(
    client: httpx.AsyncClient, address: ServerAddress, name: str, card: dict[str, Any]
) -> ModelIdentity:
    """Return an identity from Ollama's digest or llama-server's details of the weights."""
    owner = str(card.get("owned_by") or "a server")[:100]
    is_ollama = owner == "library" or httpx.URL(address.url).port == OLLAMA_PORT
    known: dict[str, Any] = {key: (table(card.get("meta")) or {}).get(key) for key in _WEIGHTS}
    if is_ollama:
        ollama = ServerAddress(address.url.removesuffix("/v1"))
        listed = tables((await _json(client, ollama, "GET", "api/tags")).get("models")) or []
        same = (f"{name}:latest", name)
        known["digest"] = next((each.get("digest") for each in listed if each.get("name") in same), None)
    weights = sha256(msgspec.json.encode([owner, name, known])).hexdigest()
    return ModelIdentity(f"{SERVED}{'Ollama' if is_ollama else owner}", weights, "")


async def _json(
    client: httpx.AsyncClient, address: ServerAddress, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await client.request(method, f"{address.url}/{path}", json=body)
    except (httpx.HTTPError, ValueError) as error:  # ValueError: a redirect to an invalid URL
        raise ModelLoadError(
            f"The local server at {address.url} does not answer ({str(error) or type(error).__name__}). Start it or "
            "fix local."
        ) from error
    if response.status_code != 200:
        told = error_in(response.content, response.status_code, f"{path} answered {response.status_code}")
        raise ModelLoadError(f"The local server at {address.url} refused: {told['message']}")
    try:
        return table(json_of(response.content)) or {}
    except ValueError as error:
        raise ModelLoadError(f"The local server at {address.url} is not OpenAI-compatible.") from error
