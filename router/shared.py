"""What all requests of one router share: its settings, its tiers, their pace, its budget."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.errors import UpdraftError
from .budget import Budget
from .config import RouterConfig
from .gates import Gates
from .pace import Pace
from .rules import Situation, no_cloud_configured, no_local_configured
from .tiers import CloudTier, LocalTier


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a router routes between. `gates` is None where there is no local tier to judge."""

    local: LocalTier | None
    cloud: CloudTier | None
    gates: Gates | None
    local_missing: UpdraftError | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """`budget` is None where there is no limit."""

    config: RouterConfig
    tiers: Tiers
    pace: Pace
    budget: Budget | None = None

    def situation(self) -> Situation:
        tiers = self.tiers
        return Situation(
            local_missing=None if tiers.local is not None else tiers.local_missing or no_local_configured(),
            cloud_missing=None if tiers.cloud is not None else no_cloud_configured(),
            offline=self.config.offline,
            local_tools=tiers.local is not None and tiers.local.tool_format is not None,
        )
