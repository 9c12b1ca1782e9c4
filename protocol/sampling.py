"""The choice of tokens: one parameter set with one meaning in both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import InvalidRequestError

#: Below this logits divided by the temperature are no longer safely finite, and chance has no say anyway.
MIN_TEMPERATURE = 1e-5
#: Alternatives that are reported per token.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, with one meaning in both engines.

    Logits are changed first (penalties, bias), then divided by the temperature, then truncated by top-k, top-p, min-p
    and typical-p, in this order. Where one of these is None, the model's own value holds (`SamplingDefaults`).
    """

    # None: as many as the engine allows (`default_max_tokens`), or as fit into the context.
    max_tokens: int | None = None
    # 0 is greedy (argmax).
    temperature: float | None = None
    # 1 is off.
    top_p: float | None = None
    # 0 is off.
    top_k: int | None = None
    # 0 is off.
    min_p: float | None = None
    # 1 is off (Meister et al. 2023).
    typical_p: float | None = None
    # Divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al. 2019); 1 is off.
    repetition_penalty: float | None = None
    # As OpenAI defines it, over the answer alone.
    frequency_penalty: float = 0.0
    # As OpenAI defines it, over the answer alone.
    presence_penalty: float = 0.0
    # (token id, what is added to its logit).
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    # Texts that end the answer.
    stop: tuple[str, ...] = ()
    # Tokens that end the answer like the model's own end.
    stop_token_ids: tuple[int, ...] = ()
    # Before so many tokens nothing ends the answer.
    min_tokens: int = 0
    # The model's own end does not end the answer.
    ignore_eos: bool = False
    # Alternatives to report per token, from the raw distribution. 0: only the chosen token. None: nothing.
    logprobs: int | None = None
    # The same for the tokens of the prompt.
    prompt_logprobs: int | None = None
    # End an answer that repeats itself (`text.repetition`).
    repetition_detection: bool = True

    def __post_init__(self) -> None:
        _check(
            self.max_tokens is None or 1 <= self.max_tokens < 2**31,
            "max_tokens",
            "at least 1, and below 2**31",
            self.max_tokens,
        )
        for name, holds, wanted in _RANGES:
            value = getattr(self, name)
            _check(value is None or holds(value), name, wanted, value)
        for name in ("frequency_penalty", "presence_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, "between -2 and 2", getattr(self, name))
        _check(len(self.logit_bias) <= 1024, "logit_bias", "of at most 1024 tokens", len(self.logit_bias))
        for _, bias in self.logit_bias:
            _check(-100 <= bias <= 100, "logit_bias", "between -100 and 100", bias)
        _check(len(self.stop) <= 4 and all(self.stop), "stop", "at most 4 non-empty strings", self.stop)
        _check(len(self.stop_token_ids) <= 64, "stop_token_ids", "at most 64 tokens", len(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check(-(2**31) <= token < 2**31, "stop_token_ids", "of token ids, which are below 2**31", token)
        _check(0 <= self.min_tokens < 2**31, "min_tokens", "0 or more, and below 2**31", self.min_tokens)
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "at most max_tokens",
            self.min_tokens,
        )
        for name, count in (("top_logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}", count)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)

    @property
    def detects_repetition(self) -> bool:
        """Whether an answer that repeats itself ends, from `min_tokens` on: not one that is wanted at full length."""
        return self.repetition_detection and not self.ignore_eos

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end an answer of this request, given the model's own."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*eos_ids, *self.stop_token_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for token ids that a model of `vocab_size` tokens does not have."""
        named = [("logit_bias", token) for token, _ in self.logit_bias]
        named += [("stop_token_ids", token) for token in self.stop_token_ids]
        for param, token in named:
            _check(0 <= token < vocab_size, param, f"of token ids from 0 to {vocab_size - 1}", token)

    def resolved(self, defaults: SamplingDefaults) -> ResolvedParams:
        """With the model's own values where there are none."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return ResolvedParams(**asdict(defaults) | {name: it for name, it in given.items() if it is not None})


@dataclass(frozen=True, slots=True)
class ResolvedParams(SamplingParams):
    """Sampling options that all have a value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def edits(self) -> bool:
        """Whether logits may be changed at all: see `text.logit_edits`."""
        return bool(self.logit_bias) or self.edits_follow

    @property
    def edits_follow(self) -> bool:
        """Whether what is changed depends on the answer so far."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalised or self.min_tokens > 0

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are cut off before one is drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def stated(self) -> SamplingDefaults:
        """The answer's report of how its tokens were chosen."""
        return SamplingDefaults(**{field.name: getattr(self, field.name) for field in fields(SamplingDefaults)})


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling where a request does not say. The defaults are llama.cpp's, `model_files` knows others."""

    # 0 is greedy.
    temperature: float = 0.8
    # 0 is off.
    top_k: int = 40
    # 1 is off.
    top_p: float = 0.95
    # 0 is off.
    min_p: float = 0.05
    # 1 is off.
    typical_p: float = 1.0
    # 1 is off.
    repetition_penalty: float = 1.0


#: The model's distribution as it is: for weights that come without files.
PLAIN_SAMPLING = SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0 <= value <= 2, "between 0 and 2"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("top_k", lambda value: 0 <= value < 2**31, "0 (off) or more, and below 2**31"),
    ("min_p", lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("typical_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("repetition_penalty", lambda value: 0.01 <= value <= 2, "between 0.01 and 2"),
)


def _check(holds: bool, param: str, wanted: str, got: object) -> None:
    if not holds:  # NaN fails every comparison above, so it lands here too
        raise InvalidRequestError(f"{param} must be {wanted}, got {got!r:.100}.", param=param, code="invalid_value")
