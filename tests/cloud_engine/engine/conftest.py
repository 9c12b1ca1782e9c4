"""Random-weight models small enough for a test, and one way to run requests to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from updraft.cloud_engine.engine import engine as engine_module
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.scheduling.growth import GrowthForecast
from updraft.cloud_engine.engine.speculation import draft_model
from updraft.cloud_engine.engine.speculation.drafter import Drafter
from updraft.cloud_engine.engine.types.outputs import PromptLogprob, RequestStats, TokenLogprob, TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.config import ModelConfig
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.rope import RotaryConfig
from updraft.protocol.sampling import SamplingParams

torch.set_num_threads(1)

VOCABULARY = 97


@pytest.fixture(autouse=True)
def eager_admission(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit requests without regard to the growth of others, so that small pools preempt often. The scheduler's own
    tests run with the forecast."""
    if request.path.parent.name != "scheduling":
        monkeypatch.setattr(GrowthForecast, "peak_with", lambda *_: 0)


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None

    def extend(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.stats = output.finish_reason, output.stats


def random_llama(seed: int, *, vocab_size: int = VOCABULARY, context_length: int = 192) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(
        ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=vocab_size,
            hidden_size=48,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            context_length=context_length,
            rms_norm_eps=1e-5,
            rotary=RotaryConfig.from_parameters({}, rotary_dim=16, context_length=context_length),
            tie_word_embeddings=False,
        )
    )
    for parameter in model.requires_grad_(False).eval().parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return model


def perturbed(model: Decoder, amount: float) -> Decoder:
    """A copy that agrees with `model` on some tokens: a draft with partial acceptance."""
    generator = torch.Generator().manual_seed(1)
    twin = Decoder(model.config).requires_grad_(False).eval()
    twin.load_state_dict(model.state_dict())
    for parameter in twin.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=amount * float(parameter.std()))
    return twin


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch each step before the result of the one before it is read, as on a GPU, but without a GPU's warm-up."""
    monkeypatch.setattr(Runner, "runs_ahead", True)
    for module in (engine_module, draft_model):
        monkeypatch.setattr(module, "make_ready", lambda *_: None)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ahead(monkeypatch)


@pytest.fixture(params=["in turn", "ahead"])
def both_depths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: with steps in turn, and with steps that are launched ahead."""
    if request.param == "ahead":
        run_ahead(monkeypatch)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Decoder]:
    return random_llama


@pytest.fixture(scope="session")
def target() -> Decoder:
    return random_llama(0)


@pytest.fixture
def fresh_draft() -> Decoder:
    """One whose weights no engine has rearranged."""
    return perturbed(random_llama(0), 0.1)


@pytest.fixture(scope="session")
def draft() -> Decoder:
    return perturbed(random_llama(0), 0.1)


@pytest.fixture(scope="session")
def make_engine(target: Decoder) -> Callable[..., Engine]:
    def make(
        *, draft: Decoder | None = None, drafters: Sequence[Drafter] = (), eos: Sequence[int] = (), **config: Any
    ) -> Engine:
        return Engine(
            ServedModel(target, eos_ids=frozenset(eos)),
            EngineConfig(**config),
            draft=DraftWeights(draft) if draft else None,
            drafters=drafters,
        )

    return make


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[list[int]]]:
    """Prompts of mixed lengths: shorter than a block, on its border, across several."""

    def make(count: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = [3, 16, 17, 1, 32, 45, 8, 15, 70, 5, 33, 20, 64, 2, 11, 50]
        return [
            torch.randint(0, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist()
            for i in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def run() -> Callable[[Engine, Sequence[GenerationRequest]], list[Result]]:
    """Add all requests, step to the end, check that nothing leaked."""

    def run_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Result]:
        results = {(request.request_id, index): Result() for request in requests for index in range(request.n)}
        for request in requests:
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                results[output.request_id, output.index].extend(output)
        assert engine.stats().kv_blocks_used == 0
        return list(results.values())

    return run_all


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[GenerationRequest]]:
    """Requests for prompts, greedy unless told otherwise."""

    def build(
        prompts: Sequence[list[int]],
        *,
        max_tokens: int = 24,
        drafts: Sequence[list[int]] = (),
        n: int = 1,
        **params: Any,
    ) -> list[GenerationRequest]:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
        return [
            GenerationRequest(f"r{i}", prompt, sampling, drafts[i] if drafts else [], n=n)
            for i, prompt in enumerate(prompts)
        ]

    return build
