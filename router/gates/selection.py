"""Which gates a pair of models gets: by confidence, those of its calibrated policy, or none that keep it local."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...classifier.target import Target
from ...protocol.errors import ConfigurationError
from .gates import CalibratedPolicy, ConfidenceGates, Gates, NoPolicyGates, PolicyGates

__all__ = ["GateSelection", "load_gates"]


@dataclass(frozen=True, slots=True)
class GateSelection:
    """What there is to choose from."""

    # As in `RouterConfig`.
    policy: str
    # The pair that runs: {"local": name, "cloud": name}.
    models: dict[str, str]
    # Folders where a policy of this pair may lie. The first that fits is taken.
    own: tuple[Path, ...] = ()
    # Whether a policy of another pair may be used.
    allow_foreign: bool = False
    # The threshold of the plain cascade, where that is the target.
    confidence: float | None = None
    target: Target = Target()  # noqa: RUF009  # frozen


def load_gates(selection: GateSelection) -> Gates:
    """Raises ConfigurationError if a named policy was made for other models."""
    if selection.confidence is not None:
        return ConfidenceGates(selection.confidence)
    from ...classifier.policy.policy import Policy

    if selection.policy == "auto":
        for folder in selection.own:
            policy = Policy.load(folder)
            if policy.models == selection.models or selection.allow_foreign:
                return _by_policy(policy, selection)
        return NoPolicyGates()
    folder = Path(selection.policy).expanduser()
    policy = Policy.load(folder)
    if policy.models != selection.models and not selection.allow_foreign:
        raise ConfigurationError(
            f"The policy in {folder} was calibrated for {_pair(policy.models)}, but this router runs "
            f"{_pair(selection.models)}: its thresholds would mean nothing here. Calibrate one for this pair (updraft "
            "calibrate), state confidence= instead (a plain threshold), or set allow_foreign_policy=true to use it as "
            "it is.",
            param="policy",
        )
    return _by_policy(policy, selection)


def _by_policy(policy: CalibratedPolicy, selection: GateSelection) -> PolicyGates:
    own = policy.models == selection.models
    caveat = "" if own else f"uncalibrated for this pair (policy of {_pair(policy.models)}): "
    return PolicyGates(policy, selection.target, caveat)


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"
