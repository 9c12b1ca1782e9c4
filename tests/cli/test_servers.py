"""The long-running commands: bad options and busy ports are refused at once."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient
from typer.testing import CliRunner
from updraft.accounting.ledger.workers import MAX_WORKERS
from updraft.cli import servers
from updraft.cli.main import app
from updraft.cli.reference import routes
from updraft.cli.shared.option_groups import expanded
from updraft.cloud_engine.engine.config import MODES, EngineConfig
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions
from updraft.cloud_engine.gateway.process import GatewayOptions, run_gateway
from updraft.cloud_engine.node import process
from updraft.cloud_engine.planning.mode_limits import measured_limits
from updraft.cloud_engine.planning.step_time import StepTimeModel
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["node", "--model", "missing", "--port", "0"], "missing"),
        (["gateway", "--node", "http://127.0.0.1:1", "--ledger", "usage.sqlite", "--port", "0"], "--keys"),
        (
            ["gateway", "--node", "http://127.0.0.1:1", "--ledger", "usage.sqlite", "--keys", "missing"],
            "The key database missing",
        ),
        (["gateway", "--no-auth", "--keep-days", "inf"], "keep_days must be a finite number, got inf."),
        (["gateway", "--no-auth", "--slo-ttft-s", "inf"], "slo_ttft_s must be a finite number, got inf."),
        (["gateway", "--no-auth", "--node", "http://h", "--ledger", ":memory:"], "--ledger must be a file"),
        (["gateway", "--no-auth", "--node", "http://h", "--ledger", "file:usage"], "--ledger must be a file"),
    ],
)
def test_a_process_that_cannot_run_says_why(updraft, arguments: list[str], message: str) -> None:
    done = updraft(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_former_variable_of_the_ledger_is_refused() -> None:
    refused = CliRunner().invoke(app, ["gateway", "--no-auth"], env={"UPDRAFT_GATEWAY_DB": "postgresql://host/db"})
    assert refused.exception is not None
    assert "`UPDRAFT_GATEWAY_DB` is now `UPDRAFT_GATEWAY_LEDGER`" in str(refused.exception)


def test_pocket_is_a_model_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[process.NodeOptions] = []
    monkeypatch.setattr(process, "run_node", taken.append)
    assert CliRunner().invoke(app, ["node", "--model", "pocket", "--draft", "pocket"]).exit_code == 0
    (options,) = taken
    assert options.model == str(pocket.pocket_large_folder())
    assert options.draft == str(pocket.pocket_small_folder())


@pytest.mark.parametrize("command", [["serve", "--local", "pocket"], ["node", "--model", "x"]])
def test_a_busy_port_is_refused(updraft, command: list[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = updraft(*command, "--port", str(port))
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "in use" in done.stderr


def test_start_failures_are_one_line(updraft, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "home" / "ledger.sqlite3")) as ledger:
        ledger.execute("PRAGMA user_version=99")  # a newer version's
    done = updraft("serve", "--port", "0", "--cloud-url", "http://127.0.0.1:9/v1", "--cloud-model", "big")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "ledger.sqlite3" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("make", [routes.node_app, routes._gateway_app])
def test_no_route_answers_a_foreign_page(make: Callable[[], FastAPI]) -> None:
    app = make()
    client = TestClient(app, base_url="http://localhost")
    endpoints = [
        (route.path, method) for route in app.routes if isinstance(route, Route) for method in route.methods or ()
    ]
    assert len(endpoints) > 8
    for path, method in endpoints:
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            assert client.request(method, path, headers=headers).status_code == 403, (method, path)


def test_only_a_node_with_a_key_trusts_tenants() -> None:
    with pytest.raises(ConfigurationError, match=r"fair needs a key, .*: set UPDRAFT_NODE_API_KEY"):
        process.run_node(process.NodeOptions("none", EngineConfig(scheduling_policy="fair")))


def test_serving_other_machines_needs_a_key(tmp_path: Path) -> None:
    """A node needs a key, a gateway a key file, and what to do is said."""
    for host in ("0.0.0.0", "::", "", "192.168.1.5", "box.lan"):
        with pytest.raises(ConfigurationError, match="without a key: set UPDRAFT_NODE_API_KEY"):
            process.run_node(process.NodeOptions("none", EngineConfig(), host=host))
        with pytest.raises(ConfigurationError, match="without a key: give --keys PATH"):
            run_gateway(
                GatewayOptions(
                    ["http://127.0.0.1:1"], AccountingOptions(str(tmp_path / "usage")), no_auth=True, host=host
                )
            )


@pytest.mark.parametrize("workers", [0, MAX_WORKERS + 1])
def test_a_gateway_runs_as_many_workers_as_have_a_place(tmp_path: Path, workers: int) -> None:
    accounting = AccountingOptions(str(tmp_path / "usage"))
    with pytest.raises(ConfigurationError, match=f"1 to {MAX_WORKERS}, got {workers}"):
        run_gateway(GatewayOptions(["http://127.0.0.1:1"], accounting, no_auth=True, workers=workers))
    refused = CliRunner().invoke(app, ["gateway", "--no-auth", "--workers", str(workers)])
    assert refused.exit_code == 2 and "--workers" in refused.stderr


start_node = expanded(servers.node)  # takes options as typer gives them
ENGINE = {
    "max_num_batched_tokens": 77, "max_num_seqs": 5, "max_model_len": 9, "num_gpu_blocks_override": 6,
    "scheduling_policy": "priority", "max_waiting": 7, "max_step_ms": 8, "enable_prefix_caching": False,
    "num_speculative_tokens": 4, "ngram": True,
    "device": "cuda", "dtype": "bfloat16", "block_size": 64, "batch_invariant": True, "attention_backend": "torch",
    "default_max_tokens": 99, "gpu_memory_utilization": 0.5, "quantization": "int8",
}  # fmt: skip
NODE = {
    "model": "m", "draft": "d", "host": "127.0.0.2", "port": 1, "restart": True, "drain_timeout_s": 2.5,
    "tool_call_parser": "hermes", "chat_template": "chatml", "ready_file": Path("r"), "exit_with_parent": True,
    "insecure": True, "allowed_hosts": ["node.lan"], "allowed_origins": ["https://app.example"],
    "public_metrics": True,
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[process.NodeOptions]:
    """The options that nodes are started with, none of which really is."""
    options: list[process.NodeOptions] = []
    monkeypatch.setattr(process, "run_node", options.append)
    return options


def test_every_option_of_a_node_reaches_it(started: list[process.NodeOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = process.NodeOptions("", EngineConfig())
    assert {*NODE, "engine", "api_key", "admin_key", "tls", "registration"} == {field.name for field in fields(plain)}
    for options, given in ((plain, NODE), (plain.engine, ENGINE)):
        assert all(getattr(options, name) != value for name, value in given.items()), "else nothing would be given"
    monkeypatch.setenv("UPDRAFT_NODE_API_KEY", "secret")
    start_node(**NODE, **ENGINE, threads=3, enforce_eager=True)  # type: ignore[arg-type]
    engine = EngineConfig(**ENGINE, threads=3, enforce_eager=True)  # type: ignore[arg-type]
    assert started == [process.NodeOptions(engine=engine, api_key="secret", **NODE)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "block_size", "used"), [("cpu", None, 16), ("cuda", None, 64), ("cuda:1", None, 64), ("cuda", 16, 16)]
)
def test_blocks_suit_the_device(
    device: str, block_size: int | None, used: int, started: list[process.NodeOptions]
) -> None:
    start_node(model="m", device=device, block_size=block_size)
    assert started[0].engine.block_size == used


def test_a_gpu_gets_larger_limits_and_the_types_of_its_checkpoint(started: list[process.NodeOptions]) -> None:
    start_node(model="m", device="cuda")
    start_node(model="m", device="cuda", mode="latency", max_num_seqs=8)
    large, quick = started[0].engine, started[1].engine
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (256, 8192)
    assert (quick.max_num_seqs, quick.max_num_batched_tokens) == (8, 2048)
    assert (large.dtype, large.gpu_memory_utilization) == ("auto", 0.92)


def test_a_mode_sets_limits_and_options_win(started: list[process.NodeOptions], tmp_path: Path) -> None:
    start_node(model="m", mode="throughput", max_step_ms=30)
    assert started[0].engine == EngineConfig(**{**asdict(MODES["throughput"]), "max_step_ms": 30})
    costs, file = StepTimeModel(0.01, 0.005, 1e-3), tmp_path / "costs.json"
    file.write_text(json.dumps({"metrics": costs.figures()}))
    start_node(model="m", mode="latency", max_step_ms=30, step_costs=file, num_speculative_tokens=3)
    measured = replace(measured_limits(costs, "latency", 30), num_speculative_tokens=3)
    assert started[1].engine == EngineConfig(**asdict(measured))
    assert started[1].engine.max_num_seqs == 4, "steps of 10 ms and 5 for each request"
