"""A cloud's file is read strictly, and says what Ray reserves, how nodes scale, and how vLLM is started."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from updraft.cloud_engine.deploy.autoscaling import LoadAutoscaler
from updraft.cloud_engine.deploy.config import (
    Autoscaling,
    CloudConfig,
    GatewayConfig,
    ModelDeployment,
    Replicas,
    read_config,
)
from updraft.cloud_engine.deploy.credentials import Credentials
from updraft.cloud_engine.deploy.local import run_local
from updraft.cloud_engine.deploy.ray_cluster import (
    check_machines,
    check_reachable,
    gateway_version,
    node_version,
    wait_for_proxies,
)
from updraft.cloud_engine.deploy.ray_cluster import gateway_options as ray_gateway_options
from updraft.cloud_engine.deploy.ray_cluster import node_options as ray_options
from updraft.cloud_engine.deploy.ray_llm import serve_config
from updraft.cloud_engine.deploy.servers import gateway_options, node_options
from updraft.cloud_engine.engine.config import MODES
from updraft.cloud_engine.gateway.access.keys import KeyStore
from updraft.cloud_engine.gateway.process import GatewayOptions
from updraft.cloud_engine.node.process import NodeOptions
from updraft.protocol.errors import ConfigurationError, PortInUseError, UpdraftError

MODELS = "models: [{name: small, model: folder"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: []", "`models` must have at least 1 entry"),
        ("gateway: {}", "`models` is missing"),
        (MODELS + "}, {name: small, model: b}]", "must be unique"),
        ("models: [{name: gateway, model: b}]", "must be unique"),
        (MODELS + ", replica: 3}]", "no setting `models[0].replica`"),
        (MODELS + ", tool_parser: hermes}]", "tool_parser` is now `tool_call_parser`"),
        (MODELS + ", replicas: {min: 3, max: 2}}]", "min must not exceed max"),
        (MODELS + ", replicas: {min: 0}}]", "must be at least 1"),
        (MODELS + ", engine: {seats: 3}}]", "no setting 'seats'"),
        (MODELS + ", engine: {policy: priority}}]", "policy is now scheduling_policy"),
        (MODELS + ", engine: {cuda_graphs: false}}]", "cuda_graphs is now enforce_eager, with the opposite value"),
        (MODELS + ", engine: {num_threads: 2}}]", "num_threads is now threads"),
        (MODELS + ", engine: {no_prefix_caching: true}}]", "is now enable_prefix_caching, with the opposite value"),
        (MODELS + ", engine: {max_batch_size: 4}}]", "max_batch_size is now max_num_seqs"),
        (MODELS + ", engine: {max_num_seqs: many}}]", "models.small.engine"),
        (MODELS + ", engine: {max_num_seqs: 0}}]", "max_num_seqs must be"),
        (MODELS + "}]\ngateway: {host: 0.0.0.0}", "--insecure"),
        ("models: [", "cloud.yaml, line 2: expected value. Check this line, and the brackets"),
        ("models: \1", "control characters are not allowed"),
        (MODELS + "}]\n" + MODELS + "}]", "duplicate key 'models'"),
        (MODELS + ", draft: a, draft: b}]", "duplicate key 'draft'"),
        (MODELS + ", replicas: {min: 1, max: 1000000}}]", "replicas.max"),
        ("models: [{model: folder}]", "`models[0].name` is missing"),
        ("models: [{name: small}]", "`models[0].model` is missing"),
        ("models: [{name: small, model: ''}]", "models[0].model"),
        ("models: [{name: Small Model, model: b}]", "models[0].name"),
        ("models: {name: small, model: b}", "`models` must be a list, not an object"),
        ("[]", "the content must be an object, not a list"),
        ("models: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (MODELS + "}]\nclouds: 3", "no setting `clouds`"),
        (MODELS + ", devices: -1}]", "models[0].devices"),
        (MODELS + ", machines: 2}]", "2 machines need equal parts of 0 devices and 1 processes"),
        (MODELS + ", machines: 2, devices: 3}]\ninsecure: true", "equal parts of 3 devices"),
        (MODELS + ", machines: 2, devices: 2}]", "exchange data without encryption"),
        (MODELS + ", machines: 2, kind: vllm}]", "machines only applies to Updraft's engine"),
        (MODELS + ", engine: {nnodes: 2}}]", "nnodes is now machines"),
        (MODELS + ", engine: {master_addr: a}}]", "no setting 'master_addr'"),
        (MODELS + ", cpus: .inf}]", "models[0].cpus"),
        (MODELS + ", labels: {zone: 1}}]", "models[0].labels"),
        (MODELS + ", kind: tgi}]", "kind` must be updraft, vllm or sglang, not 'tgi'"),
        (MODELS + ", mode: fast}]", "mode` must be latency, balanced or throughput, not 'fast'"),
        (MODELS + ", autoscaling: {target_ongoing_requests: -1}}]", "autoscaling.target_ongoing_requests"),
        (MODELS + ", autoscaling: {kv_usage: 2}}]", "autoscaling.kv_usage"),
        (MODELS + ", replicas: {min: 1, max: many}}]", "replicas.max"),
        (MODELS + ", engine: {num_gpu_blocks_override: -3}}]", "num_gpu_blocks_override must be"),
        (MODELS + ", engine: [8]}]", "models[0].engine"),
        (MODELS + ", step_costs: missing.json}]", "bench engine --only steps"),
        (MODELS + "}]\ngateway: {replicas: 2}", "`gateway.replicas` is now `workers`"),
        (MODELS + "}]\ngateway: {db: a}", "`gateway.db` is now `ledger`"),
        (MODELS + ", drain_seconds: 3}]", "`models[0].drain_seconds` is now `drain_timeout_s`"),
        (MODELS + ", autoscaling: {requests: 3}}]", "is now `target_ongoing_requests`"),
        (MODELS + "}]\ngateway: {workers: -2}", "gateway.workers"),
        (MODELS + "}]\ngateway: {workers: 33}", "`gateway.workers` must be at most 32"),
        (MODELS + "}]\ngateway: {port: 70000}", "gateway.port"),
        (MODELS + ", kind: vllm, draft: tiny}]", "draft only applies to Updraft's engine"),
        (MODELS + ", kind: sglang, mode: latency}]", "mode only applies to Updraft's engine"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cloud.yaml"
    file.write_text(text)
    with pytest.raises(UpdraftError) as caught:
        read_config(file)
    assert words in caught.value.message and "\n" not in caught.value.message


def test_the_file_in_the_guide_is_right(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/deploy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    file = tmp_path / "cloud.yaml"
    file.write_text(block)
    assert read_config(file).models[0].replicas == Replicas(min=1, max=3)


def test_files_are_those_of_the_folder_where_the_command_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas run in folders of their own. A name is no file, and an address stays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "cloud.yaml").write_text(
        "gateway: {keys: k.sqlite3, ledger: 'postgresql://host/db', prices: p.toml}\n"
        "models: [{name: a, model: mine, draft: pocket, chat_template: chatml}]"
    )
    config = read_config(Path("cloud.yaml"))
    gateway, model = config.gateway, config.models[0]
    assert (gateway.keys, gateway.prices) == (str(tmp_path / "k.sqlite3"), str(tmp_path / "p.toml"))
    assert (gateway.ledger, gateway.limits) == ("postgresql://host/db", None)
    assert (model.model, model.draft, model.chat_template) == (str(tmp_path / "mine"), "pocket", "chatml")


def test_missing_cluster_is_reported_at_once() -> None:
    """Also where something else listens, which speaks HTTP/1: Ray would wait for minutes, and not hear Ctrl-C."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ConfigurationError, match="another kind of server listens at this address"):
            check_reachable(f"127.0.0.1:{other.server_port}")
        other.shutdown()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for asked in (address, f"ray://{address}", "127.0.0.1:99999"):
            with pytest.raises(ConfigurationError, match="No Ray cluster answers"):
                check_reachable(asked)
    check_reachable("auto")


def test_a_direct_gateway_is_one_process_on_a_machine_that_is_named() -> None:
    """Ray's own proxies take its port on every machine, and another replica would find it taken."""
    gateway = GatewayConfig(workers=3, direct=True, keys="keys", host="10.0.0.1", labels={"zone": "a"})
    config = CloudConfig(models=(ModelDeployment(name="small", model="folder"),), gateway=gateway, insecure=True)
    options = ray_gateway_options(config)
    assert (options["num_replicas"], options["max_surge_percent"]) == (1, 0)
    assert options["graceful_shutdown_wait_loop_s"] == 0.5, "Ray waits 2 s, even without requests in flight"
    machines = [{"Alive": True}] * 2
    check_machines(config, machines)
    for other in ({"host": "127.0.0.1"}, {"host": "0.0.0.0"}, {"labels": {}}):
        changed = msgspec.structs.replace(config, gateway=msgspec.structs.replace(gateway, **other))
        check_machines(changed, machines[:1])
        with pytest.raises(ConfigurationError, match="listens on one machine"):
            check_machines(changed, machines)


def test_busy_port_is_reported_before_a_node_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = GatewayConfig(keys=str(tmp_path / "keys"), port=taken.getsockname()[1])
        config = CloudConfig(models=(ModelDeployment(name="small", model="folder"),), gateway=gateway)
        with pytest.raises(PortInUseError):
            run_local(tmp_path / "cloud.yaml", lambda: config, pytest.fail)


def test_without_ray_there_is_one_machine(tmp_path: Path) -> None:
    model = ModelDeployment(name="wide", model="folder", machines=2, engine={"tensor_parallel": 2})
    config = CloudConfig(models=(model,), gateway=GatewayConfig(keys=str(tmp_path / "keys")), insecure=True)
    with pytest.raises(ConfigurationError, match="need --ray"):
        run_local(tmp_path / "cloud.yaml", lambda: config, pytest.fail)


def test_options_travel_to_a_process_and_keys_are_private(tmp_path: Path) -> None:
    model = ModelDeployment(name="small", model="folder", mode="latency", engine={"max_num_seqs": 4}, devices=1)
    config = CloudConfig(models=(model,), gateway=GatewayConfig(keys=str(tmp_path / "keys")))
    credentials = Credentials(config.keys)
    credentials.prepare()
    first = credentials.register_key()
    credentials.prepare()
    assert credentials.register_key() == first, "what is there is kept"
    KeyStore(config.keys).principal(f"Bearer {first}").require("node")
    for file in (credentials.register_file, credentials.node_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    credentials.register_file.unlink()
    credentials.prepare()
    assert credentials.register_key() != first, "a lost key is replaced"
    for options in (gateway_options(config), node_options(config, model)):
        sent = msgspec.json.encode(options, enc_hook=os.fspath)
        kind: Any = NodeOptions if isinstance(options, NodeOptions) else GatewayOptions
        read = msgspec.json.decode(sent, type=kind, dec_hook=lambda kind, value: kind(value))
        assert msgspec.json.encode(read, enc_hook=os.fspath) == sent
        assert credentials.node_key() not in repr(options)
    engine = node_options(config, model).engine
    assert (engine.max_num_seqs, engine.device, engine.block_size, engine.tensor_parallel) == (4, "cuda", 64, 1)
    assert (engine.max_step_ms, engine.max_num_batched_tokens) == (MODES["latency"].max_step_ms, 2048)


def test_only_what_would_run_otherwise_gets_another_version(tmp_path: Path) -> None:
    rules = tmp_path / "limits.toml"
    rules.write_text("")
    gateway = GatewayConfig(keys=str(tmp_path / "keys"), limits=str(rules))
    model = ModelDeployment(name="small", model="folder")
    config = CloudConfig(models=(model,), gateway=gateway)
    Credentials(config.keys).prepare()
    changed = msgspec.structs.replace

    def versions(config: CloudConfig) -> tuple[str, str]:
        return gateway_version(config), node_version(config, config.models[0])

    before = versions(config)
    more = changed(
        model, replicas=Replicas(min=2, max=3), autoscaling=Autoscaling(target_ongoing_requests=2), max_surge_percent=0
    )
    other = ModelDeployment(name="other", model="b")
    assert versions(changed(config, models=(more, other), gateway=changed(gateway, workers=3))) == before
    revised, batch = changed(config, revision="2"), changed(model, engine={"max_num_seqs": 2})
    assert not set(before) & set(versions(revised))
    assert versions(changed(config, models=(batch,)))[0] == before[0]
    assert versions(changed(config, models=(batch,)))[1] != before[1]
    rules.write_text("[tenants]")
    assert versions(config)[0] != before[0], "a file that is read at the start counts by its contents"
    assert versions(config)[1] == before[1]


def test_ray_reserves_devices_of_one_machine_and_labels() -> None:
    model = ModelDeployment(
        name="big", model="m", cpus=2, devices=4, labels={"zone": "a"}, replicas=Replicas(min=1, max=3)
    )
    assert model.engine_config().tensor_parallel == 4
    options = ray_options(model)
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 4, "label_selector": {"zone": "a"}}
    assert (options["autoscaling_config"]["min_replicas"], options["autoscaling_config"]["max_replicas"]) == (1, 3)
    assert ray_options(ModelDeployment(name="small", model="m"))["num_replicas"] == 1
    options = ray_options(ModelDeployment(name="wide", model="m", cpus=2, devices=16, machines=2))
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 8}] * 2
    assert options["placement_group_strategy"] == "SPREAD"
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 8}


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        ({}, 2.0),
        ({"requests": {"a": 16.0, "b": 8.0}, "kv_usage": {"a": 0.1, "b": 0.1}}, 3.0),
        ({"requests": {"a": 1.0, "b": 0.0}, "kv_usage": {"a": 0.9, "b": 0.7}}, 2.0),
        ({"requests": {"a": 0.0, "b": 0.0}, "kv_usage": {"a": 0.0, "b": 0.0}}, 1.0),
    ],
)
def test_nodes_follow_requests_and_kv_use(metrics: dict[str, dict[str, float]], wanted: float) -> None:
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)
    assert LoadAutoscaler(8.0, 0.8)(context) == (pytest.approx(wanted), {})


def test_a_start_outlasts_the_wait_of_ray() -> None:
    calls = iter([TimeoutError("HTTP proxies not available after 60s."), TimeoutError("again"), None])

    def start() -> None:
        if (error := next(calls)) is not None:
            raise error

    wait_for_proxies(start)
    assert list(calls) == []
    calls = iter([TimeoutError("HTTP proxies not available after 60s."), None])
    with pytest.raises(TimeoutError, match="not available"):
        wait_for_proxies(start, timeout_s=0)


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecatedSince20"
)  # Ray's own classes use what pydantic will remove
def test_models_of_vllm_are_written_for_ray(caplog) -> None:
    caplog.set_level("WARNING")  # Ray changes the level of all loggers for good, and this puts it back
    model = ModelDeployment(name="qwen", model="Qwen/Qwen3-8B", kind="vllm", devices=2, engine={"max_model_len": 8192})
    (app,) = serve_config(CloudConfig(models=(model,)))["applications"]
    (written,) = app["args"]["llm_configs"]
    assert written["model_loading_config"] == {"model_id": "qwen", "model_source": "Qwen/Qwen3-8B"}
    assert written["engine_kwargs"] == {"tensor_parallel_size": 2, "max_model_len": 8192}
    assert json.loads(json.dumps(written)) == written
    with pytest.raises(ConfigurationError, match="kind vllm"):
        serve_config(CloudConfig(models=(ModelDeployment(name="ours", model="m"),)))
