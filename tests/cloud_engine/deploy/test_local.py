"""A cloud of plain processes starts anew whatever is killed, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from cloud_up import Clients, cloud_up
from gateway_keys import make_key
from homes import home_in
from ports import free_port

pytestmark = pytest.mark.slow


def test_killed_processes_restart_and_stop_with_the_cloud(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    key = make_key(home / "keys.sqlite3", "tester")
    config = tmp_path / "cloud.yaml"
    model = "{name: pocket, model: pocket, engine: {threads: 1}, replicas: {min: 2, max: 2}}"
    written = f"gateway: {{port: {free_port()}, workers: 1}}\nmodels: [{model}]\n"
    config.write_text(written)
    with cloud_up(config, {"UPDRAFT_HOME": str(home)}, key, "--processes") as cloud:
        assert cloud.healthy_nodes() == 2, "no request after `ready` may be too early"
        with Clients(cloud, count=4) as clients:
            clients.wait_for_answers(8)
            cloud.processes("deploy.launch node")[0].kill()
            clients.wait_for_answers(8)
            cloud.wait_for_nodes(lambda nodes: nodes == 2)
            before = {process.pid for process in cloud.processes("deploy.launch")}
            for text in ("models: []", written.replace("min: 2, max: 2", "min: 3, max: 3")):
                config.write_text(text)
                time.sleep(0.3)
            cloud.wait_for_nodes(lambda nodes: nodes == 3)
            assert before < {process.pid for process in cloud.processes("deploy.launch")}, "what is as wanted goes on"
            config.write_text(written)
            cloud.wait_for_nodes(lambda nodes: nodes == 2)
        assert clients.failures() == []
        (gateway,) = cloud.processes("deploy.launch gateway")
        gateway.kill()
        psutil.wait_procs([gateway], 60)
        cloud.wait_for_nodes(lambda nodes: nodes == 2)
        left = cloud.processes("deploy.launch")
        assert len(left) >= 3
    psutil.wait_procs(left, 60)
    assert cloud.processes("deploy.launch") == []
