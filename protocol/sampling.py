"""Sampling parameters and sampling noise, identical on both tiers: a seed gives the same tokens on device and cloud.

Sampling is Gumbel-max: argmax(logits / temperature - log(-log(u))) draws from softmax(logits / temperature). The
uniform number u of a token depends only on the request's seed and on the token's id and position in the sequence:

    key = mix(mix(seed) ^ position)
    u = ((mix(key + (id + 1) * GOLDEN) >> 11) + 0.5) * 2**-53        in float64, integers modulo 2**64

This module computes the key of each row in plain integers. Each engine computes u from the key with its array library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import invalid_field

#: Lower temperatures count as 0, because logits / temperature could overflow and sampling would be greedy anyway.
MIN_TEMPERATURE = 1e-5
#: Maximum number of alternatives reported per token.
MAX_LOGPROBS = 20
WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, with one meaning in both engines.

    Penalties and bias apply to the logits first, then the temperature, then truncation by top-k, top-p, min-p and
    typical-p, in this order. An option that is None takes the model's default (`SamplingDefaults`).
    """

    # Maximum tokens of the answer; None: the engine's `default_max_tokens`, or the rest of the context.
    max_tokens: int | None = None
    # Temperature; 0 is greedy (argmax).
    temperature: float | None = None
    # Nucleus sampling: probability mass to keep; 1 is off.
    top_p: float | None = None
    # Number of most likely tokens to keep; 0 is off.
    top_k: int | None = None
    # Minimum probability relative to the most likely token; 0 is off.
    min_p: float | None = None
    # Typical sampling (Meister et al. 2023): probability mass to keep; 1 is off.
    typical_p: float | None = None
    # Penalty on tokens in prompt or answer: divides positive logits, multiplies others (Keskar et al. 2019); 1: off.
    repetition_penalty: float | None = None
    # OpenAI's frequency penalty; counts tokens of the answer only.
    frequency_penalty: float = 0.0
    # OpenAI's presence penalty; counts tokens of the answer only.
    presence_penalty: float = 0.0
    # Pairs of a token id and the value added to the token's logit.
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    # Token ids that end the answer, in addition to the model's end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] = ()
    # Minimum tokens before the answer may end. A stop string may begin in these tokens, but must end in a later one.
    min_tokens: int = 0
    # Continue after the model's end-of-sequence token.
    ignore_eos: bool = False
    # Alternatives to report per token, from the raw distribution. 0: only the chosen token. None: no logprobs.
    logprobs: int | None = None
    # Alternatives to report per prompt token.
    prompt_logprobs: int | None = None
    # End an answer that falls into a loop (`text.repetition`).
    repetition_detection: bool = True

    def __post_init__(self) -> None:
        for rule, holds in _RANGES:
            value = getattr(self, rule.partition(" must ")[0])
            check_value(value is None or holds(value), rule, value)
        check_value(len(self.logit_bias) <= 1024, "logit_bias must be at most 1024 tokens", len(self.logit_bias))
        for _, bias in self.logit_bias:
            check_value(-100 <= bias <= 100, "logit_bias must be between -100 and 100", bias)
        check_value(len(self.stop) <= 4 and all(self.stop), "stop must be at most 4 non-empty strings", self.stop)
        check_value(len(self.stop_token_ids) <= 64, "stop_token_ids must be at most 64 ids", len(self.stop_token_ids))
        for token in self.stop_token_ids:
            check_value(-(2**31) <= token < 2**31, "stop_token_ids must be a list of token ids below 2**31", token)
        check_value(0 <= self.min_tokens < 2**31, "min_tokens must be 0 or more, and below 2**31", self.min_tokens)
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        check_value(fits, "min_tokens must be at most max_tokens", self.min_tokens)
        for name, count in (("top_logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check_value(0 <= (count or 0) <= MAX_LOGPROBS, f"{name} must be between 0 and {MAX_LOGPROBS}", count)
        check_value(self.seed is None or -(2**63) <= self.seed < 2**63, "seed must be a 64-bit integer", self.seed)

    @property
    def detects_repetition(self) -> bool:
        """Return whether to end a looping answer after `min_tokens`. Off with `ignore_eos`."""
        return self.repetition_detection and not self.ignore_eos

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Return all token ids that end the answer, given the model's end-of-sequence ids."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*eos_ids, *self.stop_token_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against a vocabulary of `vocab_size` tokens. Raises InvalidRequestError for unknown ids."""
        named = [("logit_bias", token) for token, _ in self.logit_bias]
        named += [("stop_token_ids", token) for token in self.stop_token_ids]
        for param, token in named:
            check_value(0 <= token < vocab_size, f"{param} must be token ids from 0 to {vocab_size - 1}", token)

    def resolved(self, defaults: SamplingDefaults) -> ResolvedParams:
        """Return these parameters with the model's defaults for options that are None."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return ResolvedParams(**asdict(defaults) | {name: own for name, own in given.items() if own is not None})


@dataclass(frozen=True, slots=True)
class ResolvedParams(SamplingParams):
    """Sampling parameters with the model's defaults filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def edits(self) -> bool:
        """Return whether any logits need editing before sampling (see `text.logit_edits`)."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return bool(self.logit_bias) or penalised or self.min_tokens > 0

    @property
    def truncates(self) -> bool:
        """Return whether any truncation (top-k, top-p, min-p, typical-p) is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def stated(self) -> SamplingDefaults:
        """Sampling values to report in the response."""
        return SamplingDefaults(**{field.name: getattr(self, field.name) for field in fields(SamplingDefaults)})


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default values for `SamplingParams`: llama.cpp's, unless `model_files` finds others in the model's files."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


#: The model's unmodified distribution, for weights that come without model files.
PLAIN_SAMPLING = SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

#: Rules, which begin with the name of a parameter, and their checks.
_RANGES: tuple[tuple[str, Callable[[float], bool]], ...] = (
    ("max_tokens must be at least 1, and below 2**31", lambda value: 1 <= value < 2**31),
    ("temperature must be between 0 and 2", lambda value: 0 <= value <= 2),
    ("top_p must be above 0 and at most 1", lambda value: 0 < value <= 1),
    ("top_k must be 0 (off) or more, and below 2**31", lambda value: 0 <= value < 2**31),
    ("min_p must be at least 0 and below 1", lambda value: 0 <= value < 1),
    ("typical_p must be above 0 and at most 1", lambda value: 0 < value <= 1),
    ("repetition_penalty must be between 0.01 and 2", lambda value: 0.01 <= value <= 2),
    ("frequency_penalty must be between -2 and 2", lambda value: -2 <= value <= 2),
    ("presence_penalty must be between -2 and 2", lambda value: -2 <= value <= 2),
)


def check_value(holds: bool, rule: str, got: object) -> None:
    """Raise InvalidRequestError unless `holds`. `rule`: a sentence such as "top_p must be above 0"."""
    if not holds:  # also true for NaN, which fails every comparison
        raise invalid_field(rule.partition(" must ")[0], f"{rule}, got {got!r:.100}.")


def mix(word: int) -> int:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014) to 0 <= word < 2**64."""
    word = (word ^ (word >> 30)) * FIRST % WORD
    word = (word ^ (word >> 27)) * SECOND % WORD
    return word ^ (word >> 31)


def noise_key(seed: int, position: int) -> int:
    """Return the key of the token at `position`, counted over prompt and answer. `seed` is taken modulo 2**64."""
    return mix(mix(seed % WORD) ^ position)
