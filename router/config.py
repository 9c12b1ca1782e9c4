"""The settings of the router, as checked dataclasses. `settings_sources` reads them from files and variables.

The comment above a field is its entry in the settings reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import httpx

from ..accounting.prices import Price
from ..classifier.target import Promise, Target
from ..protocol.decoding import prepare_types
from ..protocol.errors import ConfigurationError
from ..protocol.requests import ConfidenceSignal
from ..protocol.safety.redaction import shown_url
from ..protocol.unicode_forms import read_text
from .accounting.budget import BudgetLimits
from .accounting.prices import Prices
from .privacy.rules import Privacy
from .tiers.interfaces import Fallback
from .tiers.local_server.address import check_private, checked_url, server_address
from .tiers.providers.provider import Provider
from .tiers.providers.registry import provider_of

#: The settings that state a target. One of them at most.
TARGETS = ("quality", "cloud_share", "cost", "confidence")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING = frozenset({"connection", "content-length", "content-type", "host", "transfer-encoding"})
#: The settings that belong to one `cloud_url`, as they are for another one.
OF_CLOUD_URL: Mapping[str, Any] = MappingProxyType(
    {
        "cloud_api_key": None,
        "cloud_api_key_file": None,
        "cloud_provider": "auto",
        "cloud_headers": {},
        "cloud_query": {},
    }
)
#: The settings that choose the gates.
GATE_SETTINGS = frozenset({*TARGETS, "confidence_signal", "promise", "policy", "allow_foreign_policy", "prices"})
#: The settings that may change while a router runs.
LIVE_SETTINGS = GATE_SETTINGS | {
    "fallback",
    "hold_tokens",
    "race_above",
    "budget",
    "budget_per_key",
    "budget_per_user",
    "privacy",
}


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Whether answers are kept for requests that ask exactly the same again."""

    # Megabytes of answers to keep in memory. 0 keeps none.
    max_mb: float = 0.0
    # Seconds that an answer is kept.
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_mb", "ttl_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"cache.{name} must be 0 or more.", param=f"cache.{name}")

    def __bool__(self) -> bool:
        return self.max_mb > 0


@dataclass(frozen=True, slots=True)
class LocalModelOptions:
    """The local model's options in this process. The engine, or `updraft tune`, chooses what is left out."""

    # Tokens of prompt and answer together.
    context_length: int | None = None
    # Threads that compute.
    threads: int | None = None
    # Layers on a GPU; 0: none.
    gpu_layers: int | None = None
    # Type of keys and values: `f32`, `f16`, `q8_0` or `q4_0`.
    kv_cache_type: str | None = None
    # Files of LoRA adapters. `file.gguf:0.5` applies half of one.
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Middle:
    """One cloud between the device and the best one."""

    # The base URL of the server.
    url: str
    # The model that it serves.
    model: str
    # Its API key.
    api_key: str | None = field(default=None, repr=False)
    # Its prices, as in `prices.models`.
    price: Price | None = None
    # From this P(gain) on it is not asked, and the next cloud is.
    skip_above: float | None = None
    # Whether it continues an assistant's last message, as `cloud_continues`.
    continues: bool = False
    # Whose API it speaks, as `cloud_provider`.
    provider: str = "auto"
    # Headers for every request, as `cloud_headers`.
    headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # Parameters for every request, as `cloud_query`.
    query: dict[str, str] = field(default_factory=dict[str, str], repr=False)

    def __post_init__(self) -> None:
        _check(bool(self.model), "middle.model", "the name of a model")
        check_headers(self.headers, "middle.headers")
        _check(self.skip_above is None or 0 <= self.skip_above <= 1, "middle.skip_above", "from 0 to 1")
        provider = _provider(self.provider, self.url, "middle.url")
        _check_continuation(provider, "middle.continues", self.continues)
        url = _base_url(self.url, provider.base_path(self.query), "middle.url", "middle.api_key")
        object.__setattr__(self, "url", url)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router, exactly as given. `settings_sources.load_config` adds the user's own."""

    # The model on this device: the path of a GGUF file, the name of a pulled model, or `pocket` (the demo model in the
    # package). Or a server here: `ollama:MODEL` (at OLLAMA_HOST), or the URL of llama-server, LM Studio or another
    # OpenAI-compatible one. `none`: there is no local tier.
    local: str | None = None
    # How the local model writes tool calls: `hermes`, `llama3`, `mistral` or `mistral-args`. `auto` asks its chat
    # template. Set it for a model whose template knows no tools: they are then told in text.
    tool_parser: str = "auto"
    # The local model's chat template: `chatml`, or the path of a Jinja file. `none`: that of the model file. One
    # without gets ChatML, or each message on a line where its vocabulary has no ChatML.
    chat_template: str | None = None
    # The model to ask for where `local` is a URL. `none`: the only one that the server has.
    local_model: str | None = None
    # Whether `local` may be a server outside this machine and its private networks. Privacy rules then send it what
    # they keep on the device.
    local_public: bool = False
    # The base URL of the cloud. The path of the provider's API, such as `/v1`, is added to a bare host. `none`: there
    # is no cloud tier.
    cloud_url: str | None = None
    # Whose API the cloud speaks: `openai` (also vLLM, SGLang and most others), `azure`, `anthropic`, `gemini`, or an
    # entry point of the group `updraft.providers`. `auto`: the last three by their own hosts, else `openai`.
    cloud_provider: str = "auto"
    # Headers for every request to the cloud, such as `OpenAI-Organization` and `OpenAI-Project`. They and the next
    # count only from the sources that a key counts from.
    cloud_headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # Query parameters for every request to the cloud. With `api-version` Azure's models are deployments.
    cloud_query: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # The cloud's API key. It counts only from the source that names `cloud_url`, or from one that wins over it: a key
    # of the file is never sent to another URL of the environment, a flag or an argument.
    cloud_api_key: str | None = field(default=None, repr=False)
    # A file that holds the cloud's API key, read where `cloud_api_key` is not set. It counts as `cloud_api_key` does.
    cloud_api_key_file: Path | None = None
    # The model to ask the cloud for. Needed with `cloud_url`.
    cloud_model: str = ""
    # Whether the cloud continues an assistant's last message (`continue_final_message`), as Updraft's nodes, vLLM and
    # SGLang do. Only then is a stream shown before it is judged.
    cloud_continues: bool = False
    # Send the local answer along as `prediction` to clouds that are no Updraft nodes, too. Some bill the tokens of it
    # that they reject. An Updraft node is known by `owned_by` in its list of models.
    send_drafts: bool = False
    # Whether the cloud leaves its reasoning in the text of an answer, as `<think>`: it is then told apart, as
    # `reasoning_content`.
    cloud_reasoning_tags: bool = False
    # When the device's answer stands in for the cloud's: where the cloud is `unreachable` (no connection, too slow, 429
    # or 5xx after retries, no usable answer), after `any` failure (a wrong key or model, too), or `never`.
    fallback: Fallback = "unreachable"
    # Smaller clouds to ask before that one, from the smallest up.
    middle: tuple[Middle, ...] = ()
    # Target: share of the cloud's quality to keep, above 0 and at most 1. This and the next two need a calibrated
    # policy (`updraft calibrate`), which keeps 0.98 where no target is set.
    quality: float | None = None
    # Target: the largest share of requests to escalate.
    cloud_share: float | None = None
    # Target: the most US dollars to spend on the cloud per 1,000 requests, by `prices`.
    cost: float | None = None
    # Target: escalate when the local model was less sure of its answer than this, between 0 and 1. A plain threshold,
    # which needs no policy and promises nothing.
    confidence: float | None = None
    # What `confidence` goes by: the geometric mean token `probability`; `entropy`, as exp(-mean entropy); or `margin`
    # over the runner-up, as the logistic function of its mean.
    confidence_signal: ConfidenceSignal = "probability"
    # How the target holds: with the confidence of the calibration (`confidence`), or on average over calibrations
    # (`mean`), which escalates less.
    promise: Promise = "confidence"
    # `auto`: the policy that was calibrated for this pair of models. Or a name of `updraft policy list`, or a folder.
    policy: str = "auto"
    # Whether a policy may be used that was calibrated for other models.
    allow_foreign_policy: bool = False
    # Show a stream after this many local tokens, where `cloud_continues`. `none`: when the whole answer was judged.
    hold_tokens: int | None = None
    # Most tokens of a local answer whose request sets no `max_tokens`.
    local_max_tokens: int = 1024
    # Seconds without a local answer after which the local model leaves memory, until it is asked again. `none`: never.
    local_idle_s: float | None = None
    # How this process runs the local model.
    local_options: LocalModelOptions = field(default_factory=LocalModelOptions)
    # Start the cloud beside the device where P(gain) before generation is at least this. `none`: never.
    race_above: float | None = None
    # Never ask the cloud.
    offline: bool = False
    # Seconds that the cloud may take without a byte.
    cloud_timeout_s: float = 60.0
    # Seconds until a connection to the cloud must stand.
    cloud_connect_timeout_s: float = 2.0
    # Prices per token.
    prices: Prices = field(default_factory=Prices)
    # The SQLite file with one row per request. `none`: no ledger.
    ledger: Path | None = None
    # Days that the ledger keeps a row, at least 1. Rows that a running budget counts stay. `none`: for ever.
    ledger_days: int | None = 90
    # The budget of all requests together for the cloud, per day or month. Budgets are kept in the ledger.
    budget: BudgetLimits = field(default_factory=BudgetLimits)
    # The budget of the requests of one API key.
    budget_per_key: BudgetLimits = field(default_factory=BudgetLimits)
    # The budget of the requests of one `user` of a key.
    budget_per_user: BudgetLimits = field(default_factory=BudgetLimits)
    # Rules that keep a request on the device.
    privacy: Privacy = field(default_factory=Privacy)
    # Answers to keep for requests that ask exactly the same again.
    cache: CacheSettings = field(default_factory=CacheSettings)
    # `features` keeps features of judged answers, for `updraft learn`, in `experience.sqlite3` in the state folder; so
    # does `true`. A path names another file. Where `exploration`, `shadow` or `experience_text` is set, `features` is
    # meant. Else nothing is kept.
    experience: Path | None = None
    # Keep the texts of judged requests and both answers, too, for `updraft calibrate --from-log`.
    experience_text: bool = False
    # `true` keeps Responses, and chat completions with `store: true`, in `answers.sqlite3` in the state folder, with
    # their prompts: for `previous_response_id`, and for the caller who retrieves them. A path names another file.
    # `none`: nothing is kept.
    store: Path | None = None
    # Days that an answer is kept, at least 1.
    store_days: int = 30
    # Most answers that are kept. Beyond them the oldest go.
    store_answers: int = 10_000
    # The folder of uploaded files and of batches. Processes with the same folder work on each other's batches. `none`:
    # there are no files and no batches.
    files: Path | None = None
    # Megabytes that all files may have together. One has 512 at most.
    files_mb: int = 1024
    # Share of the requests, sampled at random, that both tiers answer, so that labels are not biased.
    exploration: float = 0.0
    # Decide and record, but answer every request from the cloud.
    shadow: bool = False
    # Other names for models: `"gpt-4o" = "auto"`. The right side is `auto`, `local`, `cloud`, a model of a cloud, or
    # another alias.
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    # Seconds of silence after which a stream of `updraft serve` that has begun gets a comment, so that no proxy ends
    # it. 0: none.
    heartbeat_s: float = 15.0
    # Names that callers may use for `updraft serve`, beside those of loopback and its own address.
    allowed_hosts: tuple[str, ...] = ()
    # Origins whose web pages may use `updraft serve`, beside those of this machine.
    allowed_origins: tuple[str, ...] = ()
    # Whether `updraft serve` without a key serves other users of this machine, too. Linux tells whose a connection is.
    allow_other_users: bool = False

    def __post_init__(self) -> None:
        _ = self.stated_target, self.target  # both raise
        _check(0 <= self.heartbeat_s < float("inf"), "heartbeat_s", "0 or more seconds")
        _check(0 <= self.exploration <= 1, "exploration", "a share from 0 to 1")
        _check(self.store_days >= 1, "store_days", "at least 1")
        _check(1 <= self.store_answers < 2**31, "store_answers", "at least 1, and below 2**31")
        _check(1 <= self.files_mb < 2**31, "files_mb", "at least 1, and below 2**31")
        _check(1 <= self.local_max_tokens < 2**31, "local_max_tokens", "at least 1, and below 2**31")
        _check(self.local_idle_s is None or self.local_idle_s >= 1, "local_idle_s", "at least 1 second")
        _check(self.confidence is None or 0 < self.confidence < 1, "confidence", "between 0 and 1")
        signals = get_args(ConfidenceSignal)
        _check(self.confidence_signal in signals, "confidence_signal", "probability, entropy or margin")
        _check(self.hold_tokens is None or self.hold_tokens >= 1, "hold_tokens", "at least 1")
        _check(self.race_above is None or 0 <= self.race_above <= 1, "race_above", "from 0 to 1")
        _check(self.cloud_timeout_s > 0, "cloud_timeout_s", "above 0 seconds")
        _check(self.cloud_connect_timeout_s > 0, "cloud_connect_timeout_s", "above 0 seconds")
        if self.cloud_api_key is None and self.cloud_api_key_file is not None:
            object.__setattr__(self, "cloud_api_key", read_key(self.cloud_api_key_file))
        _check(self.fallback in get_args(Fallback), "fallback", "unreachable, any or never")
        self._check_local()
        check_headers(self.cloud_headers, "cloud_headers")
        if self.cloud_url is not None:
            provider = _provider(self.cloud_provider, self.cloud_url, "cloud_url")
            _check_continuation(provider, "cloud_continues", self.cloud_continues)
            _check(
                provider.capabilities.predictions or not self.send_drafts,
                "send_drafts",
                f"false: the provider {provider.name} takes no drafts",
            )
            url = _base_url(self.cloud_url, provider.base_path(self.cloud_query), "cloud_url", "cloud_api_key")
            object.__setattr__(self, "cloud_url", url)
            _check(
                bool(self.cloud_model),
                "cloud_model",
                "set where cloud_url is, to the name of a model that the cloud serves (GET /v1/models lists them)",
            )
        _check(self.cloud_url is not None or not self.middle, "cloud_url", "set where there are middle tiers")
        names = [self.cloud_model, *(each.model for each in self.middle)]
        _check(all(map(str.isprintable, names)), "cloud_model", "the name of a model, which is text")
        _check(len(set(names)) == len(names), "middle.model", "another name in each tier")
        object.__setattr__(self, "aliases", _resolved(self.aliases, ("auto", "local", "cloud", *filter(None, names))))
        priced = {each.model: each.price for each in self.middle if each.price is not None}
        if priced:
            prices = replace(self.prices, models={**self.prices.models, **priced})
            object.__setattr__(self, "prices", prices)
        _check(self.ledger_days is None or self.ledger_days >= 1, "ledger_days", "at least 1")
        _check(self.ledger is not None or not any(self._limits), "ledger", "a file, since a budget is kept in it")
        if self.cloud_url is not None and not self.offline and self.counts_usd:
            for name in names:
                self._check_price(name, "a budget in US dollars")

    @property
    def _limits(self) -> tuple[BudgetLimits, ...]:
        return self.budget, self.budget_per_key, self.budget_per_user

    @property
    def counts_usd(self) -> bool:
        """Whether a budget is in US dollars, so that each model needs a price."""
        return any(each.usd is not None for each in self._limits)

    @property
    def stated_target(self) -> str | None:
        """The name of the target, if one is set. Raises ConfigurationError if there are several."""
        stated = [name for name in TARGETS if getattr(self, name) is not None]
        if len(stated) > 1:
            raise ConfigurationError(
                f"{' and '.join(stated)} exclude each other: state one target, the rest follows.", param=stated[1]
            )
        return stated[0] if stated else None

    @property
    def target(self) -> Target:
        """The target of a policy, by default quality 0.98. Raises ConfigurationError if it is out of range."""
        price = self.prices.of_cloud(self.cloud_model)
        if self.cost is not None and price is None:
            Target.of(self.quality, self.cloud_share, self.cost, (1.0, 1.0))  # what else is wrong with it comes first
            self._check_price(self.cloud_model, "the target cost")
        prices = None if price is None else (price.input, price.output)
        return replace(Target.of(self.quality, self.cloud_share, self.cost, prices), promise=self.promise)

    def _check_local(self) -> None:
        address = server_address(self.local, self.local_model)
        if address is not None and not self.local_public:
            check_private(address)
        _check(address is not None or self.local_model is None, "local_model", "unset where local is no URL")
        _check(address is None or self.local_idle_s is None, "local_idle_s", "unset where local is a server")
        _check(
            address is None or self.local_options == LocalModelOptions(),
            "local_options",
            "unset where local is a server",
        )

    def _check_price(self, model: str, what: str) -> None:
        if self.prices.of_cloud(model) is None:
            raise ConfigurationError(
                f"The model {model!r} has no price, and {what} needs one: set input and output, in US dollars per "
                f'million tokens, in [prices.models."{model}"].',
                param="prices",
            )


prepare_types(RouterConfig)


def read_key(path: Path) -> str:
    """The key in a file, without the line break at its end. Raises ConfigurationError."""
    try:
        key = read_text(path.expanduser(), ConfigurationError).strip()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ConfigurationError(f"The key file {path} {reason}.", param="cloud_api_key_file") from error
    if not key:
        raise ConfigurationError(f"The key file {path} is empty.", param="cloud_api_key_file")
    return key


def check_headers(headers: Mapping[str, str], param: str) -> None:
    """Raises ConfigurationError for headers that HTTP cannot carry, or that are its own. No value is told."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or not (value.isascii() and value.isprintable()):
            raise ConfigurationError(f"{param}: the header {name[:100]!r} cannot be sent: correct it.", param=param)
        if name.lower() in _FRAMING:
            raise ConfigurationError(f"{param}: the header {name} belongs to the connection.", param=param)


def _resolved(aliases: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Each alias with the name at the end of its chain. Raises ConfigurationError for clashes and circles."""
    found: dict[str, str] = {}
    for alias, target in aliases.items():
        _check(bool(alias) and alias not in names, f"aliases.{alias}", "a name that no model has already")
        end, passed = target, {alias}
        while end in aliases:
            _check(end not in passed, f"aliases.{alias}", "the name of a model in the end: it leads in a circle")
            passed.add(end)
            end = aliases[end]
        _check(end in names, f"aliases.{alias}", f"one of {', '.join(names)}, or an alias, not {end[:100]!r}")
        found[alias] = end
    return found


def _provider(name: str, url: str, param: str) -> Provider:
    _parsed(url, param)
    return provider_of(name, url)


def _check_continuation(provider: Provider, param: str, continues: bool) -> None:
    _check(provider.capabilities.continuation or not continues, param, f"false for the provider {provider.name}")


def _parsed(url: str, name: str) -> httpx.URL:
    try:
        return checked_url(url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} {shown_url(str(url))!r} is not a URL.", param=name) from error


def _base_url(url: str, path: str, name: str, key: str) -> str:
    parsed = _parsed(url, name)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"{name} {shown_url(url)!r} must start with http:// or https://.", param=name)
    if parsed.userinfo:
        raise ConfigurationError(f"{name} must hold no credentials: set {key} instead.", param=name)
    if parsed.query or parsed.fragment:
        query = key.replace("api_key", "query")
        raise ConfigurationError(f"{name} must end with its path: set {query} for query parameters.", param=name)
    return str(parsed.copy_with(path=parsed.path.rstrip("/") or path, query=None, fragment=None))


def _check(holds: bool, name: str, wanted: str) -> None:
    if not holds:  # NaN fails every comparison, so it lands here too
        raise ConfigurationError(f"{name} must be {wanted}.", param=name)
