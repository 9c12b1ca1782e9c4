"""Two ranks in real processes: the same answers as one, and the group ends and returns as a whole."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tokenizers
from decoder_reference import SHAPES, VOCABULARY, random_tokens, reference_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.process import core_process, engine_process
from updraft.cloud_engine.engine.process.engine_process import EngineProcess
from updraft.cloud_engine.engine.process.messages import Load
from updraft.cloud_engine.engine.ranks.group import of_rank
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError, EngineDownError, ModelLoadError
from updraft.protocol.safety.system import python_command
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.tokenizer import Tokenizer

ONE = EngineConfig(threads=1, num_gpu_blocks_override=24, max_model_len=192, max_num_batched_tokens=48, ngram=True)
TWO, STAGES = replace(ONE, tensor_parallel=2), replace(ONE, pipeline_parallel=2)
Scenario = Callable[[EngineProcess], Awaitable[None]]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither processes nor socket folders, of this process and of its children."""
    others = ranks()
    with tempfile.TemporaryDirectory(prefix="u") as folder:  # a short path, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        check_nothing_is_left(Path(folder), others)


def check_nothing_is_left(folder: Path, others: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs([process for process in ranks() if process not in others], 60)
    assert alive == []
    assert list(folder.glob("updraft-*")) == []


def ranks() -> list[psutil.Process]:
    """All descendants of this process: cores, and the ranks below them."""
    return psutil.Process().children(recursive=True)


def follower() -> psutil.Process:
    (found,) = (process for process in ranks() if any("ranks.follower" in word for word in process.cmdline()))
    return found


def leader() -> psutil.Process:
    parent = follower().parent()
    assert parent is not None
    return parent


def serve(
    config: EngineConfig, scenario: Scenario, *, model: Path | None = None, draft: bool = False, restart: bool = False
) -> None:
    async def main(engine: EngineProcess) -> None:
        await engine.start()
        try:
            await asyncio.wait_for(scenario(engine), 300)
        finally:
            await engine.close()

    load = Load(
        str(model or pocket.pocket_large_folder()), str(pocket.pocket_small_folder()) if draft else None, config
    )
    with EngineProcess(load, restart=restart) as engine:
        engine.wait_ready()
        asyncio.run(main(engine))


async def answers(engine: EngineProcess, request: GenerationRequest) -> dict[int, list[TokenOutput]]:
    collected: dict[int, list[TokenOutput]] = {}
    async for output in engine.generate(request):
        collected.setdefault(output.index, []).append(output)
    return collected


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def requests() -> list[GenerationRequest]:
    """Requests of every kind; their blocks do not fit the cache together, so some are preempted."""
    encode = Tokenizer.from_folder(pocket.pocket_large_folder()).encode
    greedy = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, ignore_eos=True)
    question = encode("Tom has 17 apples, and Ann has 25. " * 2 + "What is 17 + 25?")
    schema = json.dumps({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]})
    constraint = Constraint("json_schema", schema, "response_format")
    return [
        GenerationRequest("plain", question, greedy),
        GenerationRequest("same prefix", [*question, *encode(" Say it in words.")], greedy),
        GenerationRequest("predicted", question, greedy, draft_ids=encode("17 + 25 = 42. And so on, and so on.")),
        GenerationRequest("constrained", question, replace(greedy, ignore_eos=False), constraint=constraint),
        GenerationRequest("sampled", question, SamplingParams(temperature=0.9, top_p=0.9, max_tokens=40, seed=3), n=2),
        GenerationRequest("penalised", question, replace(greedy, frequency_penalty=0.7, presence_penalty=0.3)),
        GenerationRequest("scored", encode("the quick brown fox " * 4), replace(greedy, prompt_logprobs=1)),
        GenerationRequest("embedded", question, embed=True),
    ]


#: A core that admits requests without regard to the growth of others, so that they are preempted.
EAGER_CORE = """
import sys
from pathlib import Path
from updraft.cloud_engine.engine.process.core_main import main
from updraft.cloud_engine.engine.scheduling.growth import GrowthForecast

GrowthForecast.peak_with = lambda *_: 0
main(Path(sys.argv[-1]))
"""


@pytest.mark.parametrize(
    ("tensor", "stages", "draft"), [(2, 1, True), (2, 2, False), pytest.param(1, 2, True, marks=pytest.mark.soak)]
)
def test_ranks_answer_as_one_process(tensor: int, stages: int, draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "python_command", lambda *words: python_command("-c", EAGER_CORE, words[-1]))
    results: list[dict[str, dict[int, list[TokenOutput]]]] = []

    async def scenario(engine: EngineProcess) -> None:
        batch = requests()
        together = await asyncio.gather(*(answers(engine, request) for request in batch))
        again = await answers(engine, replace(batch[0], request_id="cached"))
        assert again[0][0].cached_tokens
        results.append(
            {"again": again} | {request.request_id: each for request, each in zip(batch, together, strict=True)}
        )
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.accepted_prediction_tokens + stats.draft_accepted + stats.ngram_accepted > 0

    for config in (ONE, replace(ONE, tensor_parallel=tensor, pipeline_parallel=stages)):
        serve(config, scenario, draft=draft)
    one, two = results
    assert one.keys() == two.keys()
    for name in one:
        for index, expected in one[name].items():
            assert_same(two[name][index], expected)


def write_random(family: str, folder: Path) -> None:
    """Write a random model of a family, with a token for each of its first bytes."""
    architecture, options = SHAPES[family]
    reference_model(architecture, **options).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokens_by_text = {each: at for at, each in enumerate(alphabet)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens_by_text, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))


#: Shapes whose layers all release blocks behind a window. Small windows leave enough blocks, so that none is preempted.
WINDOWED = ("mistral-window", "mistral-block-window", "gemma3", "phi3", "mixtral")


@pytest.mark.soak
@pytest.mark.parametrize("family", SHAPES)
def test_every_family_answers_on_ranks_as_in_one_process(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cached prefixes, predictions and preemption."""
    monkeypatch.setattr(core_process, "python_command", lambda *words: python_command("-c", EAGER_CORE, words[-1]))
    prompt = random_tokens(40)
    greedy = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, ignore_eos=True)
    results: list[dict[str, list[TokenOutput]]] = []

    async def scenario(engine: EngineProcess) -> None:
        batch = [
            GenerationRequest("plain", prompt, greedy),
            GenerationRequest("same prefix", [*prompt, *random_tokens(9, 1)], greedy),
            GenerationRequest("predicted", prompt, greedy, draft_ids=random_tokens(12, 2)),
            GenerationRequest("penalised", prompt, replace(greedy, frequency_penalty=0.7, presence_penalty=0.3)),
            GenerationRequest("other", random_tokens(60, 3), greedy),
        ]
        together = await asyncio.gather(*(answers(engine, request) for request in batch))
        results.append({request.request_id: each[0] for request, each in zip(batch, together, strict=True)})
        assert engine.stats().preemptions > 0 or family in WINDOWED[:3]

    small = replace(ONE, num_gpu_blocks_override=12 if family in WINDOWED else 20)
    stages, parts = replace(small, pipeline_parallel=2), replace(small, tensor_parallel=2)
    with tempfile.TemporaryDirectory() as folder:
        write_random(family, Path(folder))
        for config in (small, stages) if family == "olmo2" else (small, stages, parts):  # its norms cannot be split
            serve(config, scenario, model=Path(folder))
    one, *others = results
    for other in others:
        for name, expected in one.items():
            assert_same(other[name], expected)


def assert_same(ours: Sequence[TokenOutput], expected: Sequence[TokenOutput]) -> None:
    """Greedy tokens are equal while the best two differ clearly, and log-probabilities of equal tokens are close."""
    assert [output.finish_reason for output in ours][-1:] == [output.finish_reason for output in expected][-1:]
    scores = [(a, b) for a, b in zip(flat(ours), flat(expected), strict=True)]
    for (token, logprob), (wanted, wanted_logprob) in scores:
        assert token == wanted
        assert abs(logprob - wanted_logprob) < 1e-3
    for a, b in zip(ours, expected, strict=False):
        assert [each.logprob for each in a.prompt_logprobs] == pytest.approx(
            [each.logprob for each in b.prompt_logprobs], abs=1e-3
        )
        assert (a.embedding or []) == pytest.approx(b.embedding or [], abs=1e-4)


def flat(outputs: Sequence[TokenOutput]) -> list[tuple[int, float]]:
    logprobs = [score.logprob for output in outputs for score in output.logprobs]
    ids = tokens(outputs)
    return list(zip(ids, logprobs or [0.0] * len(ids), strict=True))


@pytest.mark.parametrize(
    ("victim", "config"),
    [
        (follower, TWO),
        pytest.param(leader, TWO, marks=pytest.mark.soak),
        pytest.param(follower, STAGES, marks=pytest.mark.soak),
        pytest.param(leader, STAGES, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_costs_no_request(
    victim: Callable[[], psutil.Process], config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "RESTART_BACKOFF_S", (0.0, 0.0))
    request = GenerationRequest("long", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))

    async def scenario(engine: EngineProcess) -> None:
        process = victim()
        expected = tokens((await answers(engine, request))[0])
        got: list[int] = []
        async for output in engine.generate(replace(request, request_id="interrupted")):
            got += output.token_ids
            if len(got) >= 20:
                with suppress(psutil.NoSuchProcess):  # killed already
                    process.kill()
        assert got == expected
        assert engine.stats().restarts == 1

    serve(replace(config, ngram=False), scenario, restart=True)


def test_without_restart_requests_fail_with_the_cause() -> None:
    async def scenario(engine: EngineProcess) -> None:
        request = GenerationRequest("long", [5], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
        running = asyncio.create_task(answers(engine, request))
        while not engine.stats().running:  # noqa: ASYNC110 - processes are no events
            await asyncio.sleep(0.01)
        follower().kill()
        with pytest.raises(EngineDownError, match=r"Rank 1 ended with code -9|A rank ended"):
            await running

    serve(TWO, scenario)


@pytest.mark.soak  # a collective waits for a minute
@pytest.mark.parametrize("config", [TWO, STAGES], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("victim", [follower, leader])
def test_a_stopped_rank_breaks_the_group_in_time(victim: Callable[[], psutil.Process], config: EngineConfig) -> None:
    async def scenario(engine: EngineProcess) -> None:
        request = GenerationRequest("long", [5], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
        victim().send_signal(signal.SIGSTOP)
        answer = await answers(engine, request)
        assert len(tokens(answer[0])) == 150
        assert engine.stats().restarts == 1

    serve(config, scenario, restart=True)


def test_a_sleeping_group_wakes_up() -> None:
    request = GenerationRequest("a", [5, 6], SamplingParams(temperature=0.0, max_tokens=20))

    async def scenario(engine: EngineProcess) -> None:
        before = tokens((await answers(engine, request))[0])
        await engine.sleep(1, 5.0)
        await engine.wake()
        assert tokens((await answers(engine, request))[0]) == before

    serve(TWO, scenario)


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    for config, kind, named in [
        (replace(TWO, tensor_parallel=5), ConfigurationError, "5 ranks cannot share"),
        (replace(TWO, enable_expert_parallel=True), ConfigurationError, "has no experts"),
        (TWO, ModelLoadError, "config.json"),
    ]:
        folder = pocket.pocket_large_folder() if kind is ConfigurationError else tmp_path
        with EngineProcess(Load(str(folder), None, config)) as engine, pytest.raises(kind, match=named):
            engine.wait_ready()
    with pytest.raises(ConfigurationError, match="batch_invariant excludes"):
        EngineConfig(tensor_parallel=2, batch_invariant=True)
    with pytest.raises(ConfigurationError, match="enable_expert_parallel needs a tensor_parallel above 1"):
        EngineConfig(enable_expert_parallel=True, pipeline_parallel=2)


def test_ranks_share_threads_and_have_a_gpu_each() -> None:
    assert of_rank(EngineConfig(tensor_parallel=2, threads=3), 1).threads == 3
    assert (of_rank(EngineConfig(tensor_parallel=2), 1).threads or 0) >= 1
    assert of_rank(EngineConfig(tensor_parallel=2, device="cuda"), 1).device == "cuda:1"
    with pytest.raises(ConfigurationError, match="set device to cuda instead"):
        of_rank(EngineConfig(tensor_parallel=2, device="cuda:1"), 0)
