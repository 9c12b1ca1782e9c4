"""State shared by all requests of one router: settings, tiers, latencies, budget, and the accepted model names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from ..protocol.errors import InvalidRequestError, ModelNotFoundError, UpdraftError
from ..protocol.responses import ModelCard
from .accounting.budget import Budget
from .config import RouterConfig
from .conversations import ConversationTiers
from .gates.exploration import ExplorationGates
from .gates.gates import Gates
from .gates.rules import LatencyEstimates, TierAvailability, no_cloud_configured, no_local_configured
from .request.chat_request import RequestedTier
from .tasks.book import TaskBook
from .tiers.cloud import HttpCloudTier
from .tiers.interfaces import LocalTier

_CAPABILITIES = ("chat", "completions", "embeddings", "structured_outputs")


@dataclass(frozen=True, slots=True)
class CloudCandidate:
    """A cloud tier, with the requests that it may answer."""

    model: str
    tier: HttpCloudTier
    # P(gain) from which on requests skip this cloud. None: no request skips this cloud.
    skip_above: float | None = None
    # Whether a caller's key for the best cloud is also sent here, because the server is the same.
    shares_key: bool = False

    def may_answer(self, p_gain: float | None) -> bool:
        """Return whether this cloud may answer a request with this P(gain). None: no gate has computed P(gain)."""
        return p_gain is None or self.skip_above is None or p_gain < self.skip_above


@dataclass(frozen=True, slots=True)
class Tiers:
    local: LocalTier | None
    cloud: HttpCloudTier | None
    # Gates that decide between the tiers; None without a local model.
    gates: Gates | None
    # Why the configured local model is unusable.
    local_missing: UpdraftError | None = None
    # Clouds smaller than `cloud`, smallest first.
    middle_tiers: tuple[CloudCandidate, ...] = ()

    def why_not_local(self) -> UpdraftError:
        """Return the error of a router without a local tier. Its traceback is removed, since each raise extends it."""
        return (self.local_missing or no_local_configured()).with_traceback(None)


@dataclass(frozen=True, slots=True)
class RouterState:
    config: RouterConfig
    tiers: Tiers
    latency: LatencyEstimates
    # Cloud budget; None if no limit is set.
    budget: Budget | None = None
    # Tasks of the router, which decide on requests before its gates; None without learning.
    tasks: TaskBook | None = None
    # Tiers of recent conversations.
    conversations: ConversationTiers = field(default_factory=ConversationTiers)
    # Whether a user sent the request, so that it may be sampled.
    is_observed: bool = True

    def unobserved(self) -> RouterState:
        """Return the state for a request that no user sent. It is not explored, raced or used for learning."""
        gates = self.tiers.gates
        gates = gates.unobserved() if isinstance(gates, ExplorationGates) else gates
        config, tiers = replace(self.config, race_above=None), replace(self.tiers, gates=gates)
        return replace(self, config=config, tiers=tiers, is_observed=False)

    def availability(self) -> TierAvailability:
        tiers = self.tiers
        return TierAvailability(
            local_missing=None if tiers.local is not None else tiers.why_not_local(),
            cloud_missing=None if tiers.cloud is not None else no_cloud_configured(),
            offline=self.config.offline,
            local_tools=tiers.local is not None and tiers.local.tool_format is not None,
        )


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names accepted by one router. Methods that take a name raise ModelNotFoundError for an unknown one."""

    config: RouterConfig
    tiers: Tiers
    # Start of the router, in seconds since the epoch. It is reported as the models' creation time.
    created: int

    def by_tier(self) -> dict[str, RequestedTier]:
        """Return every name with the tier that it selects."""
        tiers: dict[str, RequestedTier] = {"auto": "auto", "local": "local", "cloud": "cloud"}
        names = dict(tiers)
        if self.tiers.cloud is not None:
            clouds = (*(candidate.model for candidate in self.tiers.middle_tiers), self.config.cloud_model)
            names |= dict.fromkeys(clouds, "cloud")
        if self.tiers.local is not None:
            names[self.tiers.local.model_id] = "local"
        elif self.config.local is not None:  # the model failed to load
            names.setdefault(self.config.local_model or Path(self.config.local).stem, "local")
        names |= tiers  # `auto`, `local` and `cloud` override models with the same name
        for alias, target in self.config.aliases.items():
            names[alias] = names[target]
        return names

    def requested_tier(self, model: str) -> RequestedTier:
        names = self.by_tier()
        if model not in names:
            raise _unknown(model, names)
        return names[model]

    def direct_tier(self, body: dict[str, Any], model: str) -> RequestedTier:
        """Return the tier that `model` selects, and resolve its alias in `body`. Unknown names select the cloud, which
        also has models that are not for chat."""
        target = self.config.aliases.get(model, model)
        if "model" in body:
            body["model"] = target
        if target in self.by_tier() or self.config.cloud_url is None:
            return self.requested_tier(model)
        if self.config.counts_usd and self.config.prices.of_cloud(target) is None:
            raise InvalidRequestError(
                f"The model {target[:100]!r} has no price, but a budget in US dollars needs one. Set it in "
                "[prices.models].",
                param="model",
                code="no_price",
            )
        return "cloud"

    def device(self, model: str | None) -> LocalTier:
        """Return the local model. Raises InvalidRequestError if `model` selects the cloud."""
        if self.tiers.local is None:
            raise self.tiers.why_not_local()
        if model is not None and self.requested_tier(model) == "cloud":
            raise InvalidRequestError(
                f"The tokenizer of {model[:100]!r} is in the cloud. Use model 'local'.", param="model"
            )
        return self.tiers.local

    def cards(self) -> list[ModelCard]:
        """Return the model cards of `/v1/models`."""
        local = self.tiers.local
        tools = ["tools"] if local is not None and local.tool_format else []
        longest = UNSET if local is None else local.context_length  # known for the device only
        # `owned_by` differs from the value of nodes, by which other routers recognise nodes that accept drafts.
        return [
            ModelCard(
                id=name,
                owned_by="updraft-router",
                created=self.created,
                max_model_len=longest if tier == "local" else UNSET,
                root=self.config.aliases.get(name, UNSET),
                capabilities=UNSET if local is None or tier != "local" else [*_CAPABILITIES, *tools],
            )
            for name, tier in self.by_tier().items()
        ]

    def card(self, name: str) -> ModelCard:
        cards = {card.id: card for card in self.cards()}
        if name not in cards:
            raise _unknown(name, cards)
        return cards[name]


def _unknown(model: str, names: Iterable[str]) -> ModelNotFoundError:
    return ModelNotFoundError(f"The model {model[:100]!r} does not exist. Known: {', '.join(names)}.", param="model")
