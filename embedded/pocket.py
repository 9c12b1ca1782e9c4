"""Files of the packaged pocket pair, and its description for users."""

from __future__ import annotations

from pathlib import Path

from ..protocol.errors import ModelLoadError

WEIGHTS = Path(__file__).parent / "weights"
SMALL, LARGE = "pocket-small", "pocket-large"

ABOUT = (
    "The pocket pair is two tiny models that ship with Updraft. They do sums, dates, times, units, sorting, puzzles, "
    "capitals and JSON. They answer all other questions with a note that they do not know."
)
EXAMPLES = (
    "What is 347 + 586?",
    "Today is August 26. What date is it in 15 days?",
    "Which currency is used in the country whose capital is Hanoi?",
)


def pocket_small_gguf() -> Path:
    """Return the on-device model: a Q8_0 GGUF file with tokenizer and chat template."""
    return _packaged(f"{SMALL}.gguf")


def pocket_small_folder() -> Path:
    """Return the on-device model as a Hugging Face style folder, which the cloud uses as its draft model."""
    return _packaged(SMALL)


def pocket_large_folder() -> Path:
    """Return the cloud model as a Hugging Face style folder."""
    return _packaged(LARGE)


def policy_folder() -> Path:
    """Return the folder of the routing policy that was calibrated for the pocket pair."""
    return _packaged("policy")


def _packaged(name: str) -> Path:
    path = WEIGHTS / name
    if not path.exists():
        raise ModelLoadError(
            f"{path} is missing: the packaged models are incomplete. Reinstall Updraft, or train the models with "
            "`python -m updraft.embedded.train`."
        )
    return path
