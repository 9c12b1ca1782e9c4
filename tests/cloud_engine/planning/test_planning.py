"""A plan takes the steps of a real engine and finds the smallest fleet; three kinds of traces are read."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.accounting.ledger.table import BookedRow
from updraft.cloud_engine.engine import engine as engine_module
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.scheduling.growth import GrowthForecast
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import ScheduledRequest
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.cloud_engine.gateway.ledger.metering import UsageRow, values_of
from updraft.cloud_engine.gateway.ledger.opening import open_store
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.planning.plan import Planner, PlanObjective
from updraft.cloud_engine.planning.simulation import NodeShape, SimulatedNode, simulate
from updraft.cloud_engine.planning.step_fit import fit
from updraft.cloud_engine.planning.step_time import StepContent, StepTimeModel, read_costs
from updraft.cloud_engine.planning.trace import PlannedRequest, faster, read_trace, sample
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import SamplingParams

COSTS = StepTimeModel(0.01, 0.001, 0.0001, 1e-7, 1e-8)
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, num_gpu_blocks_override=40)
SHAPE = NodeShape(CONFIG, COSTS, 40)
LOOSE = PlanObjective(10.0, 1.0)
requests_of = st.lists(
    st.builds(PlannedRequest, st.floats(0, 5), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=25
).map(lambda rows: sorted(rows, key=lambda row: row.arrived_s))


class _Watched(Engine):
    """An engine that keeps what its steps computed."""

    contents: list[StepContent]

    def _execute(self, batch: Sequence[ScheduledRequest]) -> None:
        self.contents.append(StepContent.of(batch))
        super()._execute(batch)


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_simulation_takes_the_steps_of_a_real_engine(is_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With queues, chunks of prompts and, where requests are admitted eagerly, preemptions."""
    if is_eager:
        monkeypatch.setattr(GrowthForecast, "peak_with", lambda *_: 0)
    config = replace(CONFIG, num_gpu_blocks_override=14, max_model_len=224, enable_prefix_caching=False)
    drawn = random.Random(5)
    trace = [PlannedRequest(0.0, drawn.randint(1, 100), drawn.randint(1, 60)) for _ in range(20)]
    monkeypatch.setattr(engine_module, "fixed_rows", lambda _: COSTS.fixed_rows())
    engine = _Watched(ServedModel(load_model(pocket.pocket_large_folder())), config)
    engine.contents = []
    for number, row in enumerate(trace):
        wanted = SamplingParams(temperature=0.0, max_tokens=row.output, ignore_eos=True)
        engine.add_request(GenerationRequest(str(number), [1] * row.prompt, wanted))
    while engine.has_work:
        engine.step()
    node = SimulatedNode(config, COSTS, 14)
    for number, row in enumerate(trace):
        node.add(row, number)
    node.run_until(float("inf"))
    assert engine.stats().preemptions > 0 or not is_eager
    assert node.contents == engine.contents


@settings(max_examples=30, deadline=None)
@given(requests_of, st.integers(1, 3))
def test_every_request_is_served_once_and_in_time_s_order(trace: list[PlannedRequest], nodes: int) -> None:
    served, fleet = simulate(trace, SHAPE, nodes)
    assert [each.request for each in served] == trace
    for each in served:
        assert not each.refused
        assert each.first_s is not None
        assert each.last_s is not None
        alone = COSTS.steps + COSTS.sequences
        assert each.ttft_s >= alone * 0.999
        assert each.last_s - each.first_s >= (each.request.output - 1) * alone * 0.999
    tokens = sum(content.sequences + content.prompt_tokens for node in fleet for content in node.contents)
    assert tokens >= sum(row.prompt + row.output - 1 for row in trace)


def test_the_smallest_fleet_is_found_and_one_node_less_is_too_small() -> None:
    drawn = random.Random(1)
    trace = [PlannedRequest(number * 0.05, drawn.randint(10, 100), drawn.randint(10, 60)) for number in range(120)]
    planner = Planner(trace, SHAPE, PlanObjective(0.5, 0.05, 0.95), usd_per_hour=1.0)
    fleet = planner.sufficient_fleet()
    assert fleet.nodes > 1
    assert fleet.share >= 0.95 > planner.figures(fleet.nodes - 1).share
    assert (
        planner.with_device(0.3).nodes
        < fleet.nodes
        < replace(planner, trace=faster(planner.trace, 3.0)).sufficient_fleet().nodes
    )
    hours = sum(row.output for row in trace) / fleet.tokens_per_s / 3600
    assert fleet.usd_per_million == pytest.approx(fleet.nodes * hours / sum(row.output for row in trace) * 1e6)
    with pytest.raises(ConfigurationError, match="Even 1 nodes"):
        replace(planner, most_nodes=1).sufficient_fleet()


def test_continuous_batching_and_paged_memory_are_worth_what_text_books_say() -> None:
    """Varying lengths give several times the tokens of static batches; most of preallocated memory stays empty."""
    drawn = random.Random(2)
    trace = [PlannedRequest(0.0, drawn.randint(5, 40), 1 + int(drawn.paretovariate(1.1)) % 200) for _ in range(80)]
    planner = Planner(trace, SHAPE, LOOSE)
    continuous, static = planner.static_tokens_per_s()
    assert 2 <= continuous / static <= 23
    same = replace(planner, trace=[PlannedRequest(0.0, 1, 40)] * 80)
    continuous, static = same.static_tokens_per_s()
    assert continuous / static == pytest.approx(1.0, abs=0.05), "nothing is won where all are alike"
    assert planner.figures(1).kv_waste < 0.5 < 0.6 < planner.preallocated(1).kv_waste


def test_a_mode_trades_even_streams_for_tokens_per_second() -> None:
    """The simulation holds when more comes than is served, and long prompts are read beside the streams."""
    drawn = random.Random(4)
    trace = [PlannedRequest(number * 0.01, drawn.randint(10, 800), drawn.randint(20, 60)) for number in range(150)]
    shape = NodeShape(replace(CONFIG, max_model_len=None), COSTS, 4000)
    plan = Planner(trace, shape, LOOSE).by_mode(1)
    order = [plan[mode] for mode in ("latency", "balanced", "throughput")]
    assert [each.tokens_per_s for each in order] == sorted(each.tokens_per_s for each in order)
    assert [each.tpot_p99_s for each in order] == sorted(each.tpot_p99_s for each in order)
    assert order[0].tpot_p99_s < order[2].tpot_p99_s / 2


def test_only_oversized_requests_are_counted_as_refused() -> None:
    trace = [PlannedRequest(0.0, 300, 5), PlannedRequest(0.1, 10, 5)]
    assert Planner(trace, SHAPE, LOOSE).figures(1).refused == 1
    with pytest.raises(ConfigurationError, match="No request"):
        Planner(trace[:1], SHAPE, LOOSE).figures(1)


def test_a_comparison_survives_what_fits_no_node_and_rates_that_need_too_many() -> None:
    trace = [*[PlannedRequest(0.0, 60, 40)] * 8, PlannedRequest(0.1, 5_000, 5)]
    shape = replace(SHAPE, config=replace(CONFIG, max_model_len=None))
    assert Planner(trace, shape, LOOSE).preallocated(1).refused == 1
    heavy = [PlannedRequest(number * 0.05, 60, 40) for number in range(80)]
    alone = Planner(heavy, shape, PlanObjective(0.5, 0.05, 0.95)).sufficient_fleet().nodes
    rates = Planner(heavy, shape, PlanObjective(0.5, 0.05, 0.95), most_nodes=alone).sensitivity()
    assert rates["2"] is None
    assert rates["0.5"] is not None
    with pytest.raises(ConfigurationError, match="has no requests"):
        Planner(heavy, shape, LOOSE).with_device(1e-9)


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [PlannedRequest(float(number), 1100, 2, (1, 2, 3 + number)) for number in range(3)]
    shape = NodeShape(replace(CONFIG, max_model_len=None, max_num_batched_tokens=2048), COSTS, 400)
    served, _ = simulate(trace, shape, 1)
    assert served[1].ttft_s < served[0].ttft_s / 5


def test_costs_are_found_again_also_where_some_steps_were_held_up(tmp_path: Path) -> None:
    drawn = random.Random(3)
    contents: list[StepContent] = []
    for _ in range(400):
        chunks = drawn.randint(0, 3)
        prompt = sum(drawn.randint(1, 2 ** drawn.randint(1, 9)) for _ in range(chunks))
        pairs = prompt * drawn.randint(1, 400)
        contents.append(StepContent(1, chunks + drawn.randint(1, 16), prompt, drawn.randint(0, 5000), pairs, chunks))
    rows = (0.0, 0.0, 0.001, 0.002, 0.0005, 0.0, 0.0, 2e-5, 0.0)
    costs = replace(COSTS, chunks=0.004, cached_tokens=2048.0, uncached_tokens=3e-6, rows=rows)
    held_up = [(each, costs.seconds(each) * (30 if number % 25 == 0 else 1)) for number, each in enumerate(contents)]
    plan = fit(held_up)
    for each in contents:
        assert plan.seconds(each) == pytest.approx(costs.seconds(each), rel=0.05)
    assert plan.cached_tokens == 2048
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"commit": "x", "metrics": plan.figures()}))
    assert read_costs(path) == plan
    path.write_text('{"metrics": {}}')
    with pytest.raises(ConfigurationError, match="bench engine --only steps"):
        read_costs(path)


def test_traces(tmp_path: Path) -> None:
    azure, mooncake, ledger = tmp_path / "a.csv", tmp_path / "m.jsonl", tmp_path / "ledger.sqlite3"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,9,0\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    mooncake.write_text('{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n')
    store = open_store(ledger)
    rows = [
        UsageRow(request_id=str(number), prompt_tokens=5, completion_tokens=number, started_at=9.0 + number)
        for number in (0, 2)
    ]
    store.write([], [BookedRow(values_of(row)) for row in rows])
    store.close()
    assert read_trace(str(azure), 10) == [PlannedRequest(0.0, 374, 44), PlannedRequest(4.0, 396, 109)]
    assert read_trace(str(ledger), 10) == [PlannedRequest(0.0, 5, 2)]
    (row,) = read_trace(str(mooncake), 10)
    assert row.prompt_ids(0)[510:514] == [7 * 512 + 510, 7 * 512 + 511, 9 * 512, 9 * 512 + 1]
    assert len(row.prompt_ids(0)) == 600
    assert faster([PlannedRequest(4.0, 1, 1)], 2.0) == [PlannedRequest(2.0, 1, 1)]
    assert 250 < len(sample([row] * 1000, 0.3)) < 350
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,3,4\n2024-05-10 00:00:01+00:00,5,6\n"
    )
    assert read_trace(str(azure), 10)[1] == PlannedRequest(0.5, 5, 6)
    with closing(sqlite3.connect(tmp_path / "other.sqlite3")) as other:
        other.execute("CREATE TABLE t (x)")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.jsonl").write_text("")
    for name, row in (("short.csv", "2024-05-10 00:00:00,3"), ("negative.csv", "2024-05-10 00:00:00,-3,4")):
        (tmp_path / name).write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
    for name in ("bad.csv", "short.csv", "negative.csv", "empty.jsonl", "missing.csv", "other.sqlite3"):
        with pytest.raises(ConfigurationError, match=name):
            read_trace(str(tmp_path / name), 10)
