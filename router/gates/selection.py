"""The choice of a pair's gates: by confidence, those of its calibrated policy, or none that keep it local."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...classifier.target import Target
from ...model_files.identity import ModelIdentity
from ...protocol.errors import ConfigurationError
from ...protocol.requests import ConfidenceSignal
from .gates import CalibratedPolicy, ConfidenceGates, Gates, NoPolicyGates, PolicyGates


@dataclass(frozen=True, slots=True)
class GateSelection:
    """The policies to choose from."""

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
    confidence_signal: ConfidenceSignal = "probability"
    target: Target = Target()  # noqa: RUF009  # frozen
    # Reads which weights and template run; None: any may.
    local_model: Callable[[], ModelIdentity] | None = None


def load_gates(selection: GateSelection) -> Gates:
    """Raises ConfigurationError if a named policy was made for other models."""
    if selection.confidence is not None:
        return ConfidenceGates(selection.confidence, selection.confidence_signal)
    from ...classifier.policy.folders import named_folder
    from ...classifier.policy.policy import Policy

    if selection.policy == "auto":
        for folder in selection.own:
            policy = Policy.load(folder)
            if policy.models == selection.models or selection.allow_foreign:
                return _by_policy(folder, policy, selection)
        return NoPolicyGates()
    folder = named_folder(selection.policy)
    policy = Policy.load(folder)
    if policy.models != selection.models and not selection.allow_foreign:
        raise ConfigurationError(
            f"The policy in {folder} was calibrated for {_pair(policy.models)}, but this router runs "
            f"{_pair(selection.models)}: its thresholds would mean nothing here. Calibrate one for this pair (updraft "
            "calibrate), state confidence= instead (a plain threshold), or set allow_foreign_policy=true to use it as "
            "it is.",
            param="policy",
        )
    return _by_policy(folder, policy, selection)


def _by_policy(folder: Path, policy: CalibratedPolicy, selection: GateSelection) -> PolicyGates:
    caveat = "" if policy.models == selection.models else _foreign(_pair(policy.models))
    if not caveat and policy.local_model is not None and selection.local_model is not None:
        difference = policy.local_model.difference(selection.local_model())
        if difference is not None and not selection.allow_foreign:
            raise other_weights(folder, policy.models, difference)
        caveat = "" if difference is None else _foreign(f"{_pair(policy.models)}, {difference[0]}")
    return PolicyGates(policy, selection.target, caveat)


def other_weights(folder: Path, models: dict[str, str], difference: tuple[str, str]) -> ConfigurationError:
    """Of a policy whose local model has the name of the one that runs, and is another. Both are named."""
    made, runs = difference
    return ConfigurationError(
        f"The policy in {folder} was calibrated for {models.get('local')} as {made}, and here it runs as {runs}: it "
        "answers differently, so nothing is promised. Calibrate again (updraft calibrate), run the file of the "
        "calibration, state confidence= instead (a plain threshold), or set allow_foreign_policy=true to use the "
        "policy as it is.",
        param="policy",
        code="policy_of_another_model",
    )


def _foreign(whose: str) -> str:
    return f"uncalibrated for this pair (policy of {whose}): "


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"
