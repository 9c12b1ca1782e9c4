"""The files of the packaged pocket pair, and the words for people about it."""

from __future__ import annotations

from pathlib import Path

from ..protocol.errors import ModelLoadError

WEIGHTS = Path(__file__).parent / "weights"
SMALL, LARGE = "pocket-small", "pocket-large"

ABOUT = (
    "The pocket pair are tiny models that ship with Updraft: sums, dates, clock times, units, sorting, small puzzles, "
    "capitals and JSON. To anything else they say that they do not know it."
)
EXAMPLES = (
    "What is 347 + 586?",
    "Today is August 26. What date is it in 15 days?",
    "Which currency is used in the country whose capital is Hanoi?",
)


def pocket_small_gguf() -> Path:
    """The on-device model: Q8_0 GGUF with tokenizer and chat template inside."""
    return _packaged(f"{SMALL}.gguf")


def pocket_small_folder() -> Path:
    """The same small model as a Hugging Face style folder: the cloud's draft model."""
    return _packaged(SMALL)


def pocket_large_folder() -> Path:
    """The cloud model as a Hugging Face style folder."""
    return _packaged(LARGE)


def policy_folder() -> Path:
    """The routing policy calibrated for this pair."""
    return _packaged("policy")


def _packaged(name: str) -> Path:
    path = WEIGHTS / name
    if not path.exists():
        raise ModelLoadError(
            f"{path} is missing: this installation lost its packaged models. Install it again, or train them with "
            "`python -m updraft.embedded.train`."
        )
    return path
