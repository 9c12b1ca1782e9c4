"""Plans and results are plain data: a worker that gets them as bytes answers the same, and never without a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from updraft.cloud_engine.engine import engine as engine_module
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.step import StepPlan, StepResult, StepSampling
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.cloud_engine.engine.worker.worker import Worker
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.embedded import pocket
from updraft.protocol.errors import EngineError
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.tokenizer import Tokenizer


def sent(message: Any) -> Any:
    """Return a message as it arrives in another process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_worker_in_another_process_would_give_the_same_answers(
    runs_ahead: bool, make_engine: Any, make_prompts: Any, ask: Any, draft: Any, run: Any, monkeypatch: Any
) -> None:
    prompts = make_prompts(8, seed=4)
    requests = [replace(each, request_id=f"a{at}") for at, each in enumerate(ask(prompts, presence_penalty=0.4))]
    requests += ask(prompts, temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1)
    requests.append(GenerationRequest("embedded", prompts[2], embed=True))
    options = {"draft_length": "fixed", "block_size": 8, "num_gpu_blocks_override": 24, "max_num_seqs": 9}
    options |= {} if runs_ahead else {"draft": draft}
    engine, other = make_engine(**options), make_engine(**options)
    monkeypatch.setattr(Runner, "runs_ahead", runs_ahead)
    expected = run(other, requests)
    for name in ("launch", "sample", "read"):
        method = getattr(Worker, name)

        def apart(self: Worker, *messages: Any, method: Any = method) -> Any:
            arrived = [sent(each) if isinstance(each, StepPlan | StepSampling) else each for each in messages]
            result = method(self, *arrived)
            return sent(result) if isinstance(result, StepResult) else result

        monkeypatch.setattr(Worker, name, apart)
    assert run(engine, requests) == expected
    assert engine.stats().preemptions > 0 and bool(engine.stats().overlapped_steps) == runs_ahead


def test_a_row_without_its_mask_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pocket.pocket_large_folder()
    tokenizer = Tokenizer.from_folder(folder)
    engine = Engine(ServedModel(load_model(folder), tokenizer=tokenizer, eos_ids=tokenizer.eos_ids), EngineConfig())
    params = SamplingParams(temperature=0.0, max_tokens=5)
    constraint = Constraint("regex", "[0-9]{9}", "structured_outputs")
    engine.add_request(GenerationRequest("r", tokenizer.encode("abc"), params, constraint=constraint))
    (first,) = engine.step()
    assert tokenizer.decode(first.token_ids).isdigit()
    monkeypatch.setattr(engine_module, "_masks", lambda item: [])
    with pytest.raises(EngineError, match="Step 2 has no grammar mask for slot 0"):
        engine.step()
    assert engine.reset() == ["r"]
