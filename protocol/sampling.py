"""How to choose tokens: one parameter set with one meaning in both engines."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request. `None` means "the model's own default" where a model can have one.

    `temperature` 0 is greedy (argmax). `top_k` 0, `top_p` 1 and `min_p` 0 are off. Truncation is applied in the order
    top-k, top-p, min-p after the temperature. `logprobs` is how many alternatives to report per token (0: only the
    chosen token; None: nothing), always from the raw distribution, before temperature and truncation.
    `max_tokens` None fills the context window.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(
            self.temperature is None or 0 <= self.temperature <= 2, "temperature", "between 0 and 2", self.temperature
        )
        _check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _check(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        _check(0 <= self.min_p < 1, "min_p", "at least 0 and below 1", self.min_p)
        _check(len(self.stop) <= 4 and all(self.stop), "stop", "at most 4 non-empty strings", self.stop)
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, "top_logprobs", "between 0 and 20", self.logprobs)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)


def _check(holds: bool, param: str, wanted: str, got: object) -> None:
    if not holds:  # NaN fails every comparison above, so it lands here too
        raise InvalidRequestError(f"{param} must be {wanted}, got {got!r}.", param=param, code="invalid_value")
