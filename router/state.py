"""The state that all requests of one router share: settings, tiers, latencies, budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..protocol.errors import UpdraftError
from .accounting.budget import Budget
from .config import RouterConfig
from .gates.deadline import LatencyEstimates
from .gates.exploration import ExplorationGates
from .gates.gates import Gates
from .gates.rules import TierAvailability, no_cloud_configured, no_local_configured
from .tiers.interfaces import CloudTier, LocalTier


@dataclass(frozen=True, slots=True)
class CloudCandidate:
    """A cloud tier, of those from the device up."""

    model: str
    tier: CloudTier
    # From this P(gain) on it is not asked.
    skip_above: float | None = None
    # Whether a caller's key for the best cloud is sent here too: it is the same server.
    shares_key: bool = False

    def may_do(self, p_gain: float | None) -> bool:
        """Whether a request with this P(gain) is for it; None: nobody computed one."""
        return p_gain is None or self.skip_above is None or p_gain < self.skip_above


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a router."""

    local: LocalTier | None
    cloud: CloudTier | None
    # None where there is no local tier to judge.
    gates: Gates | None
    # Why the configured local model cannot be used.
    local_missing: UpdraftError | None = None
    # Smaller clouds than `cloud`, from the smallest up.
    middle: tuple[CloudCandidate, ...] = ()

    def why_not_local(self) -> UpdraftError:
        """The error of a router without a local tier. Its traceback would grow each time it is raised."""
        return (self.local_missing or no_local_configured()).with_traceback(None)


@dataclass(frozen=True, slots=True)
class RouterState:
    """The state of one router."""

    config: RouterConfig
    tiers: Tiers
    latency: LatencyEstimates
    # None where there is no limit.
    budget: Budget | None = None

    def unobserved(self) -> RouterState:
        """The same for one request that is no user's: nothing is explored, raced or learned from."""
        gates = self.tiers.gates
        gates = gates.unobserved() if isinstance(gates, ExplorationGates) else gates
        return replace(self, config=replace(self.config, race_above=None), tiers=replace(self.tiers, gates=gates))

    def availability(self) -> TierAvailability:
        tiers = self.tiers
        return TierAvailability(
            local_missing=None if tiers.local is not None else tiers.why_not_local(),
            cloud_missing=None if tiers.cloud is not None else no_cloud_configured(),
            offline=self.config.offline,
            local_tools=tiers.local is not None and tiers.local.tool_format is not None,
        )
