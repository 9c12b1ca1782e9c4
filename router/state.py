"""State shared by all requests of one router: settings, tiers, latencies, budget."""

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
    """A cloud tier, with the requests that it may answer."""

    model: str
    tier: CloudTier
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
    cloud: CloudTier | None
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

    def unobserved(self) -> RouterState:
        """Return the state for a request that no user sent. It is not explored, raced or used for learning."""
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
