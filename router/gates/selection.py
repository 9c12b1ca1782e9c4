"""Selection of a pair's gates: by confidence, by the calibrated policy, or by neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...classifier.target import Target
from ...model_files.identity import ModelIdentity
from ...protocol.errors import ConfigurationError
from ...protocol.requests import ConfidenceSignal
from .gates import ConfidenceGates, Gates, NoPolicyGates, PolicyGates

if TYPE_CHECKING:
    from ...classifier.policy.policy import Policy, PolicyCard


@dataclass(frozen=True, slots=True)
class GateSelection:
    """Settings that determine which policy or threshold the gates use."""

    # Value of the setting `policy` in `RouterConfig`.
    policy: str
    # Models of the running pair: {"local": name, "cloud": name}.
    models: dict[str, str]
    # Folders in which to look for a policy of this pair. The first policy found is used.
    own: tuple[Path, ...] = ()
    # Whether a policy that was calibrated for another pair may be used.
    allow_foreign: bool = False
    # Confidence threshold, if the gates compare only the confidence. A policy is then not used.
    confidence: float | None = None
    confidence_signal: ConfidenceSignal = "probability"
    target: Target = Target()  # noqa: RUF009  # frozen
    # Function that returns the identity of the loaded weights and template. None: any model is allowed.
    local_model: Callable[[], ModelIdentity] | None = None
    # Number of values in a hidden state of the local model. None: not known yet.
    hidden_size: int | None = None


P = TypeVar("P", "Policy", "PolicyCard")


def load_gates(selection: GateSelection) -> Gates:
    """Load the gates. Raises ConfigurationError if the policy is damaged, of another version or for other models."""
    if selection.confidence is not None:
        return ConfidenceGates(selection.confidence, selection.confidence_signal)
    from ...classifier.policy.policy import Policy

    chosen = _chosen(selection, Policy.load)
    if chosen is None:
        return NoPolicyGates()
    folder, policy = chosen
    if selection.hidden_size is not None:
        _check_widths(folder, policy.card, selection.hidden_size)
    return PolicyGates(policy, selection.target, _caveat(folder, policy, selection))


def check_policy(selection: GateSelection) -> bool:
    """Check the policy files that `load_gates` would load, and return whether any exist. Raises the same errors."""
    from ...classifier.policy.policy import checked_card

    chosen = _chosen(selection, checked_card)
    if chosen is None:
        return False
    _caveat(*chosen, selection)
    return True


def _chosen(selection: GateSelection, load: Callable[[Path], P]) -> tuple[Path, P] | None:
    """Return the folder and the policy, or None if no folder in `selection.own` has a policy of the pair."""
    from ...classifier.policy.folders import named_folder

    if selection.policy == "auto":
        for folder in selection.own:
            policy = load(folder)
            if policy.models == selection.models or selection.allow_foreign:
                return folder, policy
        return None
    folder = named_folder(selection.policy)
    policy = load(folder)
    if policy.models != selection.models and not selection.allow_foreign:
        raise ConfigurationError(
            f"The policy in {folder} was calibrated for {_pair(policy.models)}, but this router runs "
            f"{_pair(selection.models)}: its thresholds do not apply here. Calibrate one for this pair (updraft "
            "calibrate), set confidence= instead (a plain threshold), or set allow_foreign_policy=true to use it "
            "anyway.",
            param="policy",
        )
    return folder, policy


def _caveat(folder: Path, policy: Policy | PolicyCard, selection: GateSelection) -> str:
    """Return the prefix of every reason if the policy was made for another pair. Raises ConfigurationError."""
    caveat = "" if policy.models == selection.models else _foreign(_pair(policy.models))
    if not caveat and policy.local_model is not None and selection.local_model is not None:
        difference = policy.local_model.difference(selection.local_model())
        if difference is not None and not selection.allow_foreign:
            raise other_weights(folder, policy.models, difference)
        caveat = "" if difference is None else _foreign(f"{_pair(policy.models)}, {difference[0]}")
    return caveat


def _check_widths(folder: Path, card: PolicyCard, hidden_size: int) -> None:
    from ...classifier.features.blocks import BLOCKS

    declared = {
        width for blocks in card.blocks.values() for name, width in blocks.items() if BLOCKS[name].width is None
    }
    if declared - {hidden_size}:
        raise ConfigurationError(
            f"The policy in {folder} reads hidden states of {max(declared)} values, but the local model has "
            f"{hidden_size}: it was made for another kind of model. Calibrate a policy for this model (updraft "
            "calibrate).",
            param="policy",
        )


def other_weights(folder: Path, models: dict[str, str], difference: tuple[str, str]) -> ConfigurationError:
    """Return the error for a policy whose local model has the same name as the running model but differs from it."""
    made, runs = difference
    return ConfigurationError(
        f"The policy in {folder} was calibrated for {models.get('local')} as {made}, but here it runs as {runs}. The "
        "model answers differently, so the promise does not hold. Calibrate again (updraft calibrate), run the file of "
        "the calibration, set confidence= instead (a plain threshold), or set allow_foreign_policy=true to use the "
        "policy anyway.",
        param="policy",
        code="policy_of_another_model",
    )


def _foreign(whose: str) -> str:
    return f"uncalibrated for this pair (policy of {whose}): "


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"
