"""Which gates a pair of models gets: those of its own policy, of the general one, or token confidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...classifier.aim import Aim
from ...protocol.errors import ConfigurationError
from ..cascade.second import SecondSampleGates
from .gates import CalibratedPolicy, ConfidenceGates, Gates, GeneralGates, PolicyGates

__all__ = ["Choice", "load_gates"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What there is to choose from. `policy`: as in RouterConfig. `models`: the pair that runs, {"local", "cloud"}.

    `own`: folders where a policy of this pair may lie, the first that fits is taken. `general`: the policy for pairs
    without one; None: token confidence for those. `second_sample`: gate 3 may ask for one.
    """

    policy: str
    models: dict[str, str]
    own: tuple[Path, ...] = ()
    general: Path | None = None
    allow_foreign: bool = False
    confidence: float = 0.8
    aim: Aim = Aim()  # noqa: RUF009  # frozen
    second_sample: bool = False


def load_gates(choice: Choice) -> Gates:
    """Raises ConfigurationError if a policy named by its folder was made for other models and `allow_foreign` is off,
    or if nothing here can keep the target, or knows second samples where they are to be taken.
    """
    if choice.policy == "none":
        return _by_confidence(choice)
    if choice.policy == "auto":
        return _automatic(choice)
    from ...classifier.policies import load_policy

    folder = Path(choice.policy).expanduser()
    policy = load_policy(folder)
    if policy.models != choice.models and not choice.allow_foreign:
        raise ConfigurationError(
            f"The policy in {folder} was calibrated for {_pair(policy.models)}, but this router runs "
            f"{_pair(choice.models)}: its thresholds would mean nothing here. Calibrate one for this pair (updraft "
            "calibrate), set policy='none' (token confidence), or set allow_foreign_policy=true to use it as it is.",
            param="policy",
        )
    return _by_policy(policy, choice)


def _automatic(choice: Choice) -> Gates:
    from ...classifier.policies import load_policy

    for folder in choice.own:
        policy = load_policy(folder)
        if policy.models == choice.models or choice.allow_foreign:
            return _by_policy(policy, choice)
    if choice.general is None:
        return _by_confidence(choice)
    _check_second_sample(choice)
    return GeneralGates(load_policy(choice.general), choice.aim, choice.confidence)


def _by_policy(policy: CalibratedPolicy, choice: Choice) -> PolicyGates:
    own = policy.models == choice.models
    caveat = "" if own else f"uncalibrated for this pair (policy of {_pair(policy.models)}): "
    gates = SecondSampleGates if choice.second_sample else PolicyGates
    return gates(policy, choice.aim, caveat)


def _check_second_sample(choice: Choice) -> None:
    """Raises ConfigurationError where second samples are to be taken, and nobody knows what they say."""
    if choice.second_sample:
        from ...classifier.second import required

        required(None)


def _by_confidence(choice: Choice) -> ConfidenceGates:
    _check_second_sample(choice)
    if choice.aim.name != "quality":
        raise ConfigurationError(
            f"{choice.aim.name} needs a calibrated policy, and token confidence is none: calibrate one for this pair "
            "(updraft calibrate), or state a quality.",
            param=choice.aim.name,
        )
    return ConfidenceGates(choice.confidence)


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"
