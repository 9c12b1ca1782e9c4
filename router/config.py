"""Router settings as checked dataclasses. The comment above a field is its entry in the settings reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

import httpx

from ..accounting.ledger.files import NOT_FILES
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
from .tiers.local_server.tier import check_private, checked_url, server_address
from .tiers.providers.provider import Provider
from .tiers.providers.registry import provider_of

#: Settings that state a routing target. At most one of these may be set.
TARGETS = ("quality", "cloud_share", "cost", "confidence")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING = frozenset({"connection", "content-length", "content-type", "host", "transfer-encoding"})
#: Settings that are only valid for one `cloud_url`, with the values to reset them to if `cloud_url` changes.
OF_CLOUD_URL: Mapping[str, Any] = MappingProxyType(
    {
        "cloud_api_key": None,
        "cloud_api_key_file": None,
        "cloud_provider": "auto",
        "cloud_headers": {},
        "cloud_query": {},
    }
)
#: Current name of a setting by its former name.
_RENAMED = MappingProxyType(
    {
        "middle": "middle_tiers",
        "tool_parser": "tool_call_parser",
        "context_length": "max_model_len",
        "parallel": "max_num_seqs",
        "queue_limit": "max_waiting",
    }
)
#: Settings that determine the gates: after a change, the gates are loaded again.
GATE_SETTINGS = frozenset({*TARGETS, "confidence_signal", "promise", "policy", "allow_foreign_policy", "prices"})
#: Settings that may change while a router runs.
LIVE_SETTINGS = GATE_SETTINGS.union(
    ("fallback", "hold_tokens", "race_above", "budget", "budget_per_key", "budget_per_user", "privacy")
)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of the cache that repeats answers to identical requests."""

    # Memory for cached answers, in megabytes. 0 turns the cache off.
    max_mb: float = 0.0
    # Lifetime of a cached answer, in seconds.
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        _check(0 <= self.max_mb < 2**31, "cache.max_mb must be 0 or more, and below 2**31")
        _check(0 <= self.ttl_s < inf, "cache.ttl_s must be 0 or more seconds")

    def __bool__(self) -> bool:
        return self.max_mb > 0


@dataclass(frozen=True, slots=True)
class LocalModelOptions:
    """Options of the local model in this process. The engine or `updraft tune` chooses options that are not set."""

    # Context length: tokens of prompt and answer together.
    max_model_len: int | None = None
    # Maximum number of answers generated at once. Without it: 8.
    max_num_seqs: int | None = None
    # Maximum number of requests that wait while `max_num_seqs` answers are generated.
    max_waiting: int = 256
    # Number of compute threads.
    threads: int | None = None
    # Number of layers on a GPU; 0 for none.
    gpu_layers: int | None = None
    # Data type of the KV cache: `f32`, `f16`, `q8_0` or `q4_0`.
    kv_cache_type: str | None = None
    # LoRA adapter files. `file.gguf:0.5` applies an adapter at half strength.
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CloudTierConfig:
    """A smaller cloud, which is asked before the best cloud."""

    # Base URL of the server.
    url: str
    # Model to ask for.
    model: str
    # API key of the server.
    api_key: str | None = field(default=None, repr=False)
    # Prices of the model (see `prices.models`).
    price: Price | None = None
    # P(gain) from which this cloud is skipped and the next cloud is asked.
    skip_above: float | None = None
    # Whether the cloud can continue an assistant's last message (see `cloud_continues`).
    continues: bool = False
    # API of the cloud (see `cloud_provider`).
    provider: str = "auto"
    # Headers of every request (see `cloud_headers`).
    headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # Query parameters of every request (see `cloud_query`).
    query: dict[str, str] = field(default_factory=dict[str, str], repr=False)

    def __post_init__(self) -> None:
        _check(bool(self.model), "middle_tiers.model must be the name of a model")
        check_headers(self.headers, "middle_tiers.headers")
        _check(self.skip_above is None or 0 <= self.skip_above <= 1, "middle_tiers.skip_above must be from 0 to 1")
        url, _ = _checked_cloud("middle_tiers.", self.url, self.provider, self.query, continues=self.continues)
        object.__setattr__(self, "url", url)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router, exactly as given. `settings_sources.load_config` reads the user's settings."""

    # Model on this device: the path of a GGUF file, the name of a pulled model, or `pocket` (the demo model in the
    # package). A server on this device also works: `ollama:MODEL` (at OLLAMA_HOST), or the URL of llama-server, LM
    # Studio or another OpenAI-compatible server. `none`: no local tier.
    local: str | None = None
    # Format of the local model's tool calls: `hermes`, `llama3`, `mistral`, `mistral-args`, `qwen3_coder`, `glm45` or
    # `gemma4`. `auto` detects it in the chat template. Set a format if the template does not support tools: the prompt
    # then describes them in text.
    tool_call_parser: str = "auto"
    # Chat template of the local model: `chatml`, or the path of a Jinja file. `none`: the template of the model file. A
    # file without a template gets ChatML, or one message per line if its vocabulary has no ChatML tokens.
    chat_template: str | None = None
    # Model to ask for if `local` is a URL. `none`: the server's only model.
    local_model: str | None = None
    # Whether `local` may be a server outside this machine and its private networks. Such a server also receives the
    # requests that privacy rules keep on the device.
    local_public: bool = False
    # Base URL of the cloud. The path of the provider's API, such as `/v1`, is added to a bare host. `none`: no cloud.
    cloud_url: str | None = None
    # API of the cloud: `openai` (vLLM, SGLang and most others too), `azure`, `anthropic`, `gemini`, or an entry point
    # of the group `updraft.providers`. `auto`: `azure`, `anthropic` or `gemini` for their own hosts, else `openai`.
    cloud_provider: str = "auto"
    # Headers of every request to the cloud, such as `OpenAI-Organization` and `OpenAI-Project`. Like `cloud_query`,
    # they are accepted only from sources that may set `cloud_api_key`.
    cloud_headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # Query parameters of every request to the cloud. With `api-version`, model names are Azure deployments.
    cloud_query: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # API key of the cloud. The key must come from the source that sets `cloud_url`, or from one that overrides it. A
    # key in the file is never sent to a URL from the environment, a flag or an argument.
    cloud_api_key: str | None = field(default=None, repr=False)
    # File with the cloud's API key, read if `cloud_api_key` is not set. Allowed in the same sources as `cloud_api_key`.
    cloud_api_key_file: Path | None = None
    # Model to ask the cloud for. Required with `cloud_url`.
    cloud_model: str = ""
    # Whether the cloud can continue an assistant's last message (`continue_final_message`). Updraft nodes, vLLM and
    # SGLang support this. Required to show a stream before the answer is judged (`hold_tokens`).
    cloud_continues: bool = False
    # Send the local answer as `prediction` also to clouds that are not Updraft nodes. Some clouds bill the prediction
    # tokens that they reject. Updraft nodes are recognised by `owned_by` in their list of models.
    send_drafts: bool = False
    # Whether the cloud leaves its reasoning in the text, as `<think>`. The router moves it to `reasoning_content`. It
    # sends earlier reasoning in the field of the cloud's answers, and as `reasoning_content` before the first answer.
    cloud_reasoning_tags: bool = False
    # When a local answer replaces the cloud's: if the cloud is `unreachable` (no connection, too slow, 429 or 5xx after
    # retries, no usable answer), after `any` failure (including a wrong key or model), or `never`.
    fallback: Fallback = "unreachable"
    # Smaller clouds to ask before the best cloud, smallest first.
    middle_tiers: tuple[CloudTierConfig, ...] = ()
    # Target: share of the cloud's quality to keep, above 0 and at most 1. `quality`, `cloud_share` and `cost` need a
    # calibrated policy (`updraft calibrate`). Without a target, a calibrated policy keeps 0.98.
    quality: float | None = None
    # Target: largest share of requests to escalate.
    cloud_share: float | None = None
    # Target: highest cloud cost in US dollars per 1,000 requests, computed from `prices`.
    cost: float | None = None
    # Target: escalate answers in which the local model's confidence is below this number between 0 and 1. This plain
    # threshold needs no policy and promises nothing.
    confidence: float | None = None
    # Signal for `confidence`: `probability` (geometric mean over tokens), `entropy` (exp(-mean entropy)) or `margin`
    # (logistic function of the mean lead over the runner-up).
    confidence_signal: ConfidenceSignal = "probability"
    # `net`: the target holds with the probability `promise_level`. `no-loss`: likewise, but what only the device gets
    # right does not make up for losses. `mean`: on average, with fewer escalations.
    promise: Promise = "net"
    # Policy to use: `auto` (calibrated for this pair of models), a name of `updraft policy list`, or a folder.
    policy: str = "auto"
    # Whether a policy calibrated for other models may be used.
    allow_foreign_policy: bool = False
    # Show a stream after this many local tokens, if `cloud_continues` is true. `none`: after the answer was judged.
    hold_tokens: int | None = None
    # Token limit of a local answer if the request sets no `max_tokens`.
    local_max_tokens: int = 1024
    # Idle seconds after which the local model is unloaded. The next local request loads the model again. `none`: never.
    local_idle_s: float | None = None
    # Options of the local model in this process.
    local_options: LocalModelOptions = field(default_factory=LocalModelOptions)
    # Ask the cloud in parallel with the device if P(gain) before generation is at least this value. `none`: never.
    race_above: float | None = None
    # Never ask the cloud.
    offline: bool = False
    # Seconds without a byte after which a cloud request fails.
    cloud_timeout_s: float = 60.0
    # Timeout for connecting to the cloud, in seconds.
    cloud_connect_timeout_s: float = 2.0
    # Token prices, in US dollars per million tokens.
    prices: Prices = field(default_factory=Prices)
    # SQLite file with one row per request. `none`: no ledger.
    ledger: Path | None = None
    # Days to keep a ledger row, at least 1. Rows of the current budget periods are kept. `none`: for ever.
    ledger_days: int | None = 90
    # Cloud budget of all requests together, per day or month. Budgets are kept in the ledger.
    budget: BudgetLimits = field(default_factory=BudgetLimits)
    # Cloud budget of each API key.
    budget_per_key: BudgetLimits = field(default_factory=BudgetLimits)
    # Cloud budget of each `user` of an API key.
    budget_per_user: BudgetLimits = field(default_factory=BudgetLimits)
    # Rules that keep requests on the device.
    privacy: Privacy = field(default_factory=Privacy)
    # Cache of answers to identical requests.
    cache: CacheSettings = field(default_factory=CacheSettings)
    # `true` learns tasks: requests with the same system prompt, tools, format and model. Both tiers answer sampled
    # requests, and a task moves to the device while its samples prove the quality (`quality`, else 0.95). The evidence
    # is kept in `tasks.sqlite3` in the state folder. A path keeps the evidence in another file. `none`: no learning.
    learn: Path | None = None
    # `features` or `true` stores features of judged answers, for `updraft learn`, in `experience.sqlite3` in the state
    # folder. A path stores the features in another file. The default is `features` with `exploration`, `shadow` or
    # `experience_text`, and otherwise to store nothing.
    experience: Path | None = None
    # Also store the texts of judged requests and of the answers of both tiers, for `updraft calibrate --from-log`.
    experience_text: bool = False
    # `true` stores prompts and answers of Responses, and of chat completions with `store: true`, in `answers.sqlite3`
    # in the state folder. Callers can then retrieve them and use `previous_response_id`. A path stores them in another
    # file. `none`: nothing is stored.
    store: Path | None = None
    # Days to keep a stored answer, at least 1.
    store_days: int = 30
    # Maximum number of stored answers. The oldest are deleted first.
    store_answers: int = 10_000
    # Folder of uploads and batches. Processes that share a folder also share its batches. `none`: no files or batches.
    files: Path | None = None
    # Size limit of all files together, in megabytes. A single file may have at most 512 megabytes.
    files_mb: int = 1024
    # Share of the requests, sampled at random, that both tiers answer, so that training labels are not biased.
    exploration: float = 0.0
    # Decide on each request and record the decision, but answer every request from the cloud.
    shadow: bool = False
    # Other model names: `"gpt-4o" = "auto"`. The right side is `auto`, `local`, `cloud`, a cloud's model, or an alias.
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    # Seconds of silence until `updraft serve` sends a comment in a stream, so that proxies keep it open. 0: never.
    heartbeat_s: float = 15.0
    # Size limit of a request's body to `updraft serve`, in megabytes, from 1 to 256. For uploads, see `files_mb`.
    body_mb: int = 8
    # Host names that callers may use for `updraft serve`, besides `localhost`, loopback addresses and its own address.
    allowed_hosts: tuple[str, ...] = ()
    # Origins whose web pages may use `updraft serve`, besides those of this machine.
    allowed_origins: tuple[str, ...] = ()
    # Whether `updraft serve` without a key also serves other users of this machine, whom it can detect only on Linux.
    allow_other_users: bool = False

    def __new__(cls, *_: Any, **given: Any) -> Self:
        cls.check_renamed(given)
        return object.__new__(cls)

    @staticmethod
    def check_renamed(given: Mapping[str, Any], source: str = "") -> None:
        """Raise ConfigurationError for a former name of a setting, or of a value of `promise`."""
        for name in filter(_RENAMED.get, given):
            raise ConfigurationError(f"`{name}`{source} is now `{_RENAMED[name]}`: rename the setting.", param=name)
        if (former := given.get("promise")) in ("confidence", "level"):
            raise ConfigurationError(f'promise = "{former}"{source} is now promise = "no-loss".', param="promise")

    def __post_init__(self) -> None:
        _ = self.stated_target, self.target  # both raise ConfigurationError for invalid targets
        _check(0 <= self.heartbeat_s < inf, "heartbeat_s must be 0 or more seconds")
        _check(0 <= self.exploration <= 1, "exploration must be a share from 0 to 1")
        _check(self.store_days >= 1, "store_days must be at least 1")
        _check(1 <= self.store_answers < 2**31, "store_answers must be at least 1, and below 2**31")
        _check(1 <= self.files_mb < 2**31, "files_mb must be at least 1, and below 2**31")
        _check(1 <= self.body_mb <= 256, "body_mb must be from 1 to 256")
        _check(1 <= self.local_max_tokens < 2**31, "local_max_tokens must be at least 1, and below 2**31")
        idle_s = self.local_idle_s
        _check(idle_s is None or 1 <= idle_s < inf, "local_idle_s must be at least 1 second, and finite")
        _check(self.confidence is None or 0 < self.confidence < 1, "confidence must be between 0 and 1")
        signals = get_args(ConfidenceSignal)
        _check(self.confidence_signal in signals, "confidence_signal must be probability, entropy or margin")
        _check(self.hold_tokens is None or self.hold_tokens >= 1, "hold_tokens must be at least 1")
        _check(self.race_above is None or 0 <= self.race_above <= 1, "race_above must be from 0 to 1")
        for name in ("cloud_timeout_s", "cloud_connect_timeout_s"):
            _check(0 < getattr(self, name) < inf, f"{name} must be above 0 seconds, and finite")
        if self.cloud_api_key is None and self.cloud_api_key_file is not None:
            object.__setattr__(self, "cloud_api_key", read_key(self.cloud_api_key_file))
        _check(self.fallback in get_args(Fallback), "fallback must be unreachable, any or never")
        self._check_local()
        check_headers(self.cloud_headers, "cloud_headers")
        if self.cloud_url is not None:
            url, provider = _checked_cloud(
                "cloud_", self.cloud_url, self.cloud_provider, self.cloud_query, continues=self.cloud_continues
            )
            object.__setattr__(self, "cloud_url", url)
            _check(
                provider.capabilities.predictions or not self.send_drafts,
                f"send_drafts must be false, because the provider {provider.name} takes no drafts",
            )
            _check(
                bool(self.cloud_model),
                "cloud_model must be set with cloud_url, to the name of a model that GET /v1/models lists",
            )
        _check(self.cloud_url is not None or not self.middle_tiers, "cloud_url must be set if there are middle tiers")
        names = [self.cloud_model, *(each.model for each in self.middle_tiers)]
        _check(all(map(str.isprintable, names)), "cloud_model must be a printable model name")
        _check(len(set(names)) == len(names), "middle_tiers.model must be a different name in each tier")
        object.__setattr__(self, "aliases", _resolved(self.aliases, ("auto", "local", "cloud", *filter(None, names))))
        priced = {each.model: each.price for each in self.middle_tiers if each.price is not None}
        if priced:
            prices = replace(self.prices, models={**self.prices.models, **priced})
            object.__setattr__(self, "prices", prices)
        _check(self.ledger_days is None or self.ledger_days >= 1, "ledger_days must be at least 1")
        is_path = self.ledger is None or not str(self.ledger).startswith(NOT_FILES)
        _check(is_path, "ledger must be the path of a file, or none to turn the ledger off")
        _check(self.ledger is not None or not any(self._limits), "ledger must be a file, because it keeps the budgets")
        if self.cloud_url is not None and not self.offline and self.counts_usd:
            for name in names:
                self._check_price(name, "a budget in US dollars")

    @property
    def _limits(self) -> tuple[BudgetLimits, ...]:
        return self.budget, self.budget_per_key, self.budget_per_user

    @property
    def counts_usd(self) -> bool:
        """Return whether a budget is in US dollars, so that each model needs a price."""
        return any(each.usd is not None for each in self._limits)

    @property
    def stated_target(self) -> str | None:
        """Name of the target, if one is set. Raises ConfigurationError if several are set."""
        stated = [name for name in TARGETS if getattr(self, name) is not None]
        if len(stated) > 1:
            raise ConfigurationError(
                f"{' and '.join(stated)} exclude each other. Set only one target.", param=stated[1]
            )
        return stated[0] if stated else None

    @property
    def target(self) -> Target:
        """Target of a policy, by default quality 0.98. Raises ConfigurationError if the value is out of range."""
        price = self.prices.of_cloud(self.cloud_model)
        if self.cost is not None and price is None:
            Target.of(self.quality, self.cloud_share, self.cost, (1.0, 1.0))  # raises if the value itself is invalid
            self._check_price(self.cloud_model, "the target cost")
        prices = None if price is None else (price.input, price.output)
        return replace(Target.of(self.quality, self.cloud_share, self.cost, prices), promise=self.promise)

    def _check_local(self) -> None:
        address = server_address(self.local, self.local_model)
        if address is not None and not self.local_public:
            check_private(address)
        has_needless_name = address is None and self.local_model is not None
        _check(not has_needless_name, "local_model must be left unset, because local is not a URL")
        why = "must be left unset, because local is a server"
        _check(address is None or self.local_idle_s is None, f"local_idle_s {why}")
        _check(address is None or self.local_options == LocalModelOptions(), f"local_options {why}")

    def _check_price(self, model: str, what: str) -> None:
        if self.prices.of_cloud(model) is None:
            raise ConfigurationError(
                f"The model {model!r} has no price, but {what} needs one. Set input and output, in US dollars per "
                f'million tokens, in [prices.models."{model}"].',
                param="prices",
            )


prepare_types(RouterConfig)


def read_key(path: Path) -> str:
    """Return the API key in a file, without outer blanks. Raises ConfigurationError for an unreadable or empty file."""
    try:
        key = read_text(path.expanduser(), ConfigurationError).strip()
    except OSError as error:
        raise ConfigurationError(f"The key file {path} cannot be read: {error.strerror}.") from error
    if not key:
        raise ConfigurationError(f"The key file {path} is empty: write the key into it.")
    return key


def check_headers(headers: Mapping[str, str], param: str) -> None:
    """Raise ConfigurationError for an invalid header or a header that HTTP itself sets. Messages omit the values."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or not (value.isascii() and value.isprintable()):
            raise ConfigurationError(f"{param}: write the header {name[:100]!r} in printable ASCII.", param=param)
        if name.lower() in _FRAMING:
            raise ConfigurationError(f"{param}: HTTP itself sets the header {name}. Leave it out.", param=param)


def _resolved(aliases: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the model name of each alias. Raises ConfigurationError for name clashes and cycles."""
    resolved: dict[str, str] = {}
    for alias, target in aliases.items():
        _check(bool(alias) and alias not in names, f"aliases.{alias} must be a name that no model has")
        end, passed = target, {alias}
        while end in aliases:
            _check(end not in passed, f"aliases.{alias} must be an alias that leads to a model, not in a cycle")
            passed.add(end)
            end = aliases[end]
        _check(end in names, f"aliases.{alias} must be one of {', '.join(names)}, or an alias, not {end[:100]!r}")
        resolved[alias] = end
    return resolved


def _checked_cloud(
    prefix: str, url: str, provider_name: str, query: Mapping[str, str], *, continues: bool
) -> tuple[str, Provider]:
    """Return the base URL and the provider of a cloud whose settings begin with `prefix`. Raises ConfigurationError."""
    name = f"{prefix}url"
    try:
        parsed = checked_url(url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} {shown_url(str(url))!r} is not a URL.", param=name) from error
    provider = provider_of(provider_name, url)
    allowed = provider.capabilities.continuation or not continues
    _check(allowed, f"{prefix}continues must be false for the provider {provider.name}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"{name} {shown_url(url)!r} must start with http:// or https://.", param=name)
    if parsed.userinfo:
        raise ConfigurationError(f"{name} must not contain credentials. Set {prefix}api_key instead.", param=name)
    if parsed.query or parsed.fragment:
        raise ConfigurationError(f"{name} must end with its path. Set {prefix}query for query parameters.", param=name)
    path = parsed.path.rstrip("/") or provider.base_path(query)
    return str(parsed.copy_with(path=path, query=None, fragment=None)), provider


def _check(holds: bool, rule: str) -> None:
    if not holds:  # also false for NaN, which fails every comparison
        raise ConfigurationError(f"{rule}.", param=rule.partition(" must ")[0])
