"""`updraft.OpenAI` and `updraft.AsyncOpenAI`: openai's own classes with the router as their transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import openai

from ..classifier.target import Promise
from ..protocol.errors import ConfigurationError, UnsupportedFeatureError
from ..protocol.requests import ConfidenceSignal
from ..router.config import OF_CLOUD_URL, TARGETS, LocalModelOptions, RouterConfig
from ..router.settings_checks import check_settings
from ..router.settings_sources import load_config
from .caller_keys import BASE_URL, PLACEHOLDER_KEY, CallerKeys, ambient_keys
from .requests import AsyncRequests, Requests
from .runtime_pool import RuntimeLease
from .transport import RETRIES, async_transport, httpx_of_openai, sync_transport


class _Unset:
    """Marker of a parameter that was not given, because None is a valid value."""


_UNSET = _Unset()
# No server can listen on port 0, so keys and prompts of a WebSocket never leave this process.
_NO_WEBSOCKET = "ws://127.0.0.1:0"


class _RoutedReply:
    """Base class of both clients: the constructor, and the options of each request."""

    _http_client: Callable[[RuntimeLease], Any]

    def __init__(  # noqa: PLR0913 - keyword-only settings, as upstream's constructor has them
        self,
        *,
        cloud_url: str | _Unset | None = _UNSET,
        cloud_api_key: str | _Unset | None = _UNSET,
        cloud_model: str | _Unset = _UNSET,
        cloud_provider: str | _Unset = _UNSET,
        local: str | Path | _Unset | None = _UNSET,
        local_options: LocalModelOptions | _Unset = _UNSET,
        quality: float | _Unset = _UNSET,
        cloud_share: float | _Unset = _UNSET,
        cost: float | _Unset = _UNSET,
        confidence: float | _Unset = _UNSET,
        confidence_signal: ConfidenceSignal | _Unset = _UNSET,
        promise: Promise | _Unset = _UNSET,
        learn: bool | str | Path | _Unset | None = _UNSET,
        ledger: str | Path | _Unset | None = _UNSET,
        config: RouterConfig | None = None,
        **options: Any,
    ) -> None:
        given = _given(
            cloud_url=cloud_url,
            cloud_api_key=cloud_api_key,
            cloud_model=cloud_model,
            cloud_provider=cloud_provider,
            local=local,
            local_options=local_options,
            quality=quality,
            cloud_share=cloud_share,
            cost=cost,
            confidence=confidence,
            confidence_signal=confidence_signal,
            promise=promise,
            learn=learn,
            ledger=ledger,
        )
        super().__init__(**_upstream(options, config, given, self._http_client))

    if not TYPE_CHECKING:  # type checkers see the properties of openai's client

        @cached_property
        def responses(self) -> Any:
            return _without_websocket(super().responses)

        @cached_property
        def realtime(self) -> Any:
            return _without_websocket(super().realtime)

    def _build_request(self, options: Any, **kwargs: Any) -> Any:
        """Pass the remaining retries to the router, which can retry a cloud call without repeating local work."""
        base: Any = super()  # openai's client
        request: Any = base._build_request(options, **kwargs)
        retries = options.get_max_retries(self.max_retries)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        request.extensions[RETRIES] = max(0, retries - kwargs.get("retries_taken", 0))
        return request


def _without_websocket(resource: Any) -> Any:
    """Make the resource's `connect` raise an error, because a WebSocket would bypass the transport."""
    resource.connect = _refuse_websocket
    return resource


def _refuse_websocket(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedFeatureError(
        "WebSockets need the daemon: run `updraft serve`, and connect with openai.OpenAI(base_url=...)."
    )


def _sync_client(lease: RuntimeLease) -> Any:
    httpx = httpx_of_openai()
    return _leased(httpx.Client(transport=sync_transport(httpx, lease, _keys_of(lease)), base_url=BASE_URL), lease)


def _async_client(lease: RuntimeLease) -> Any:
    httpx = httpx_of_openai()
    transport = async_transport(httpx, lease, _keys_of(lease))
    return _leased(httpx.AsyncClient(transport=transport, base_url=BASE_URL), lease)


def _keys_of(lease: RuntimeLease) -> CallerKeys:
    settings_key = {lease.config.cloud_api_key} if lease.config.cloud_api_key else set[str]()
    return CallerKeys(frozenset({PLACEHOLDER_KEY} | settings_key) | ambient_keys(), checks_url=True)


class OpenAI(_RoutedReply, openai.OpenAI):
    """`openai.OpenAI`, answered by the on-device model, the cloud, or both: `model="auto" | "local" | "cloud"`.

    cloud_url, cloud_api_key, cloud_model, cloud_provider: the cloud's address, key, model and API.
    local: a GGUF file, the name of a pulled model, or a local server such as "ollama:qwen3".
    local_options: options of a model file that runs in this process.
    ledger: the file with one row per request; None: no ledger.

    Set at most one of three targets. Each needs a calibrated policy.
    quality: the share of the cloud's quality to keep.
    cloud_share: the maximum share of requests to escalate.
    cost: the maximum US dollars per 1,000 requests.
    promise: "net" if the target holds with a stated probability, "no-loss" if gains of the local model must not make up
        for losses, "mean" if the target holds on average.
    confidence: instead of a target, a plain threshold for the local model's confidence.
    confidence_signal: the measure of this confidence: "probability", "entropy" or "margin".

    These arguments override `config`. Without `config`, the user's settings apply (`load_config`). All other arguments
    are those of `openai.OpenAI`, except that `base_url` and `http_client` cannot be set, and `api_key` is an alias of
    `cloud_api_key`, never read from OPENAI_API_KEY. A key that a copy or a request sets (`with_options(api_key=...)`,
    `client.api_key = ...`, a callable, the header Authorization) replaces `cloud_api_key` for these requests.

    Raises ConfigurationError for unusable settings or without a model. Close the client, or use it in a `with` block.
    """

    _http_client = staticmethod(_sync_client)

    @cached_property
    def updraft(self) -> Requests:
        """Explanations of requests and feedback on answers: `why` and `feedback`."""
        return Requests(self)


class AsyncOpenAI(_RoutedReply, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` with the arguments of `updraft.OpenAI`."""

    _http_client = staticmethod(_async_client)

    @cached_property
    def updraft(self) -> AsyncRequests:
        """Explanations of requests and feedback on answers: `why` and `feedback`."""
        return AsyncRequests(self)


def _given(**settings: Any) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if not isinstance(value, _Unset)}
    if isinstance(given.get("local"), Path):
        given["local"] = str(given["local"])
    if isinstance(given.get("ledger"), str):
        given["ledger"] = None if given["ledger"] in ("", "none") else Path(given["ledger"]).expanduser()
    return given


def _upstream(
    options: dict[str, Any], config: RouterConfig | None, given: dict[str, Any], client: Callable[[RuntimeLease], Any]
) -> dict[str, Any]:
    """Return the arguments for openai's constructor. A copy of a client shares its http_client and router."""
    http_client = options.get("http_client")
    if http_client is not None:
        if getattr(http_client, "updraft_lease", None) is None:
            raise ConfigurationError("http_client cannot be set: the router is the transport.", param="http_client")
        if given or config is not None:
            raise ConfigurationError("A copy of a client shares its router and settings. Create a new client.")
    RouterConfig.check_renamed(options, ", a setting of RouterConfig,")
    base_url = options.get("base_url")
    if base_url is not None and str(base_url).rstrip("/") != BASE_URL:
        raise ConfigurationError("base_url belongs to the router. Set cloud_url instead.", param="base_url")
    if options.get("websocket_base_url") not in (None, _NO_WEBSOCKET):
        raise ConfigurationError("websocket_base_url cannot be set: the router has no WebSocket in this process.")
    if http_client is None:
        settings = _settings(config, given, options.get("api_key"))
        check_settings(settings)
        http_client = client(RuntimeLease(settings))
    return {
        **options,
        "api_key": options.get("api_key") or PLACEHOLDER_KEY,
        "base_url": BASE_URL,
        "websocket_base_url": _NO_WEBSOCKET,
        "http_client": http_client,
    }


def _leased(client: Any, lease: RuntimeLease) -> Any:
    client.updraft_lease = lease  # identifies HTTP clients made by this package
    return client


def _settings(config: RouterConfig | None, given: dict[str, Any], api_key: Any) -> RouterConfig:
    if isinstance(api_key, str) and api_key:
        if given.get("cloud_api_key", api_key) != api_key:
            raise ConfigurationError("api_key and cloud_api_key differ. Set only one.", param="api_key")
        given = {**given, "cloud_api_key": api_key}
    return settings_of(config, given)


def settings_of(config: RouterConfig | None, given: dict[str, Any]) -> RouterConfig:
    if config is None:
        return load_config(given)
    if given.get("cloud_url") not in (None, config.cloud_url):  # the key in `config` must not go to another URL
        given = {**OF_CLOUD_URL, **given}
    stated = any(name in given for name in TARGETS)  # a stated target replaces the target in `config`
    return replace(config, **({**dict.fromkeys(TARGETS), **given} if stated else given))
