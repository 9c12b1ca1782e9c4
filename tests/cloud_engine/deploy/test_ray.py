"""A cloud on a real Ray loses no request while its nodes and replicas are killed, updated and scaled."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cloud_up import MODEL, Clients, CloudUp, cloud_up, command, ready_url
from gateway_keys import make_key
from homes import home_in
from ports import free_port

pytest.importorskip("ray", reason="needs the [scale] extra")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # Ray starts a dozen processes

CONFIG = """
gateway: {{port: {port}, cpus: 0.1}}
models:
  - name: pocket
    model: pocket
    engine: {{threads: 1, max_num_seqs: {batch}, tensor_parallel: {machines}}}
    machines: {machines}
    cpus: 0.1
    drain_timeout_s: 20
    replicas: {{min: {least}, max: {most}}}
    autoscaling: {{target_ongoing_requests: 4, upscale_delay_s: 1, downscale_delay_s: 2}}
insecure: {insecure}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "cloud.yaml"


def write(config: Path, port: int, *, least: int, most: int, batch: int = 8, machines: int = 1) -> None:
    settings = {"port": port, "least": least, "most": most, "batch": batch, "machines": machines}
    config.write_text(CONFIG.format(**settings, insecure=str(machines > 1).lower()))


@pytest.fixture(scope="module")
def cloud(config: Path) -> Iterator[CloudUp]:
    home = home_in(config.parent)
    ray_folder = tempfile.mkdtemp(prefix="ray")  # short: sockets are in it
    environment = {"UPDRAFT_HOME": str(home), "RAY_TMPDIR": ray_folder, "HOME": str(config.parent)}
    key = make_key(home / "keys.sqlite3", "tester")
    write(config, free_port(), least=2, most=2)
    try:
        with cloud_up(config, environment, key, "--ray") as running:
            yield running
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)


def test_gateway_requires_a_key_and_lists_the_model(cloud: CloudUp) -> None:
    assert httpx.get(f"{cloud.url}/v1/models").status_code == 401
    listed = httpx.get(f"{cloud.url}/v1/models", headers=cloud.headers).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert cloud.healthy_nodes() == 2
    with Clients(cloud) as clients:
        clients.wait_for_answers(5)
    assert clients.failures() == []


@pytest.mark.soak  # test_local.py kills a node without Ray
@pytest.mark.parametrize("killed", ["deploy.launch node", "ray::ServeReplica:updraft:pocket"])
def test_a_kill_costs_no_request_and_is_made_good(cloud: CloudUp, killed: str) -> None:
    with Clients(cloud) as clients:
        clients.wait_for_answers(40)
        victim = cloud.processes(killed)[0]
        victim.kill()
        clients.wait_for_answers(40)
        cloud.wait_for_nodes(lambda nodes: nodes == 2)
        clients.wait_for_answers(40)
    assert len(cloud.processes("deploy.launch node")) == 2
    assert clients.failures() == []


@pytest.mark.soak
def test_an_update_costs_no_request_and_nodes_follow_the_load(cloud: CloudUp, config: Path) -> None:
    def pids(words: str) -> set[int]:
        return {process.pid for process in cloud.processes(words)}

    def update(least: int, most: int, batch: int) -> None:
        write(config, int(cloud.url.rpartition(":")[2]), least=least, most=most, batch=batch)
        with command(["up", str(config), "--ray", "--address", "auto"], cloud.environment) as process:
            ready_url(process)

    nodes, gateways = pids("deploy.launch node"), pids("ray::ServeReplica:updraft:gateway")
    with Clients(cloud) as clients:
        clients.wait_for_answers(20)
        update(least=2, most=3, batch=8)
        assert nodes <= pids("deploy.launch node"), "other bounds restart nothing"
        update(least=1, most=3, batch=4)
        cloud.wait_for_nodes(lambda nodes: nodes == 3)
        clients.wait_for_answers(40)
        assert not nodes & pids("deploy.launch node")
    assert pids("ray::ServeReplica:updraft:gateway") == gateways
    with Clients(cloud, count=1) as last:
        cloud.wait_for_nodes(lambda nodes: nodes == 1)
    assert clients.failures() == []
    assert last.failures() == []


@pytest.mark.soak
def test_a_replica_may_have_several_machines(cloud: CloudUp, config: Path) -> None:
    """Ray spreads them over its machines, or puts them on the only one."""
    write(config, int(cloud.url.rpartition(":")[2]), least=1, most=1, machines=2)
    with command(["up", str(config), "--ray", "--address", "auto"], cloud.environment) as process:
        ready_url(process)
    cloud.wait_for_nodes(lambda nodes: nodes == 1)
    with Clients(cloud, count=1) as clients:
        clients.wait_for_answers(5)
    assert clients.failures() == []
    (rank,) = cloud.processes("ranks.follower")
    rank.kill()
    cloud.wait_for_nodes(lambda nodes: nodes == 0)
    cloud.wait_for_nodes(lambda nodes: nodes == 1)
    with Clients(cloud, count=1) as clients:
        clients.wait_for_answers(5)
    assert clients.failures() == []


def test_down_stops_the_gateway_and_its_nodes(cloud: CloudUp) -> None:
    assert cloud.processes("deploy.launch node")
    with command(["down"], cloud.environment) as stopping:
        assert stopping.wait(120) == 0
    assert cloud.processes("deploy.launch node") == []
    assert cloud.healthy_nodes() == 0
