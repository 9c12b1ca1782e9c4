"""The model names that a request may give: `auto`, the tiers, their models, and aliases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET

from ..protocol.errors import InvalidRequestError, ModelNotFoundError
from ..protocol.responses import ModelCard
from .config import RouterConfig
from .request.chat_request import RequestedTier
from .state import Tiers
from .tiers.interfaces import LocalTier


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of one router. The methods that take a name raise ModelNotFoundError for one that is none of them."""

    config: RouterConfig
    tiers: Tiers

    def by_tier(self) -> dict[str, RequestedTier]:
        """Every name, and the tier that it asks for."""
        tiers: dict[str, RequestedTier] = {"auto": "auto", "local": "local", "cloud": "cloud"}
        names = dict(tiers)
        if self.tiers.cloud is not None:
            clouds = (*(candidate.model for candidate in self.tiers.middle), self.config.cloud_model)
            names |= dict.fromkeys(clouds, "cloud")
        if self.tiers.local is not None:
            names[self.tiers.local.model_id] = "local"
        elif self.config.local is not None:  # it could not be loaded
            names.setdefault(self.config.local_model or Path(self.config.local).stem, "local")
        names |= tiers  # whatever a file or a cloud's model is called
        for alias, target in self.config.aliases.items():
            names[alias] = names[target]
        return names

    def requested_tier(self, model: str) -> RequestedTier:
        names = self.by_tier()
        if model not in names:
            raise _unknown(model, names)
        return names[model]

    def direct_tier(self, body: dict[str, Any], model: str) -> RequestedTier:
        """The tier that `model` asks for; it is named in `body` as the cloud knows it. A name that is none of ours is
        that of a model of the cloud, which has more than those for chat.
        """
        target = self.config.aliases.get(model, model)
        if "model" in body:
            body["model"] = target
        if target in self.by_tier() or self.config.cloud_url is None:
            return self.requested_tier(model)
        if self.config.counts_usd and self.config.prices.of_cloud(target) is None:
            raise InvalidRequestError(
                f"The model {target[:100]!r} has no price, and a budget in US dollars needs one: set it in "
                "[prices.models].",
                param="model",
                code="no_price",
            )
        return "cloud"

    def device(self, model: str | None) -> LocalTier:
        """The model on the device, which `model` names, or nobody. Raises InvalidRequestError."""
        if self.tiers.local is None:
            raise self.tiers.why_not_local()
        if model is not None and self.requested_tier(model) == "cloud":
            raise InvalidRequestError(
                f"The tokenizer of {model[:100]!r} is the cloud's: ask for that of 'local'.", param="model"
            )
        return self.tiers.local

    def cards(self, created: int) -> list[ModelCard]:
        """As `/v1/models` lists them."""
        local = self.tiers.local
        room = UNSET if local is None else local.context_length  # what a cloud has room for, it says itself
        # The owner is no node, so that nobody sends a draft.
        return [
            ModelCard(
                id=name,
                owned_by="updraft-router",
                created=created,
                max_model_len=room if tier == "local" else UNSET,
                root=self.config.aliases.get(name, UNSET),
                capabilities=UNSET if local is None or tier != "local" else _capabilities(local),
            )
            for name, tier in self.by_tier().items()
        ]

    def card(self, name: str, created: int) -> ModelCard:
        cards = {card.id: card for card in self.cards(created)}
        if name not in cards:
            raise _unknown(name, cards)
        return cards[name]


def _capabilities(local: LocalTier) -> list[str]:
    return ["chat", "completions", "embeddings", "structured_outputs", *(["tools"] if local.tool_format else [])]


def _unknown(model: str, names: Iterable[str]) -> ModelNotFoundError:
    return ModelNotFoundError(f"The model {model[:100]!r} does not exist. Known: {', '.join(names)}.", param="model")
