"""A cloud process killed in the middle of a request: an answer or a typed error within seconds, never a hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from router_fakes import LOCAL_TEXT, ScriptedGates, ScriptedLocal, tiers
from updraft.router.config import RouterConfig

CLOUD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from router_fakes import running_cloud
with running_cloud() as cloud:
    cloud.mode = sys.argv[2]
    print(cloud.url, flush=True)
    while not cloud.requests:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(120)
"""


class CloudProcess:
    def __init__(self, mode: str) -> None:
        support = Path(__file__).parents[1] / "support"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLOUD, str(support), mode], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def wait_for_request(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "asked\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def slow_cloud() -> Iterator[CloudProcess]:
    cloud = CloudProcess("slow")
    yield cloud
    cloud.close()


@pytest.mark.parametrize("model", ["auto", "cloud"])
def test_kill_dash_nine(slow_cloud: CloudProcess, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(config: RouterConfig) -> Any:
        return tiers(ScriptedLocal(), config, ScriptedGates(after=True))

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    with updraft.OpenAI(
        config=RouterConfig(local="pocket", cloud_url=slow_cloud.url, cloud_model="pocket-large"), max_retries=0
    ) as client:
        killed_at: list[float] = []

        def kill() -> None:
            slow_cloud.wait_for_request()
            killed_at.append(time.monotonic())
            slow_cloud.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        messages: Any = [{"role": "user", "content": "hello"}]
        if model == "auto":
            completion = client.chat.completions.create(model=model, messages=messages)
            assert completion.choices[0].message.content == LOCAL_TEXT
            assert completion.model_extra is not None
            assert completion.model_extra["updraft"]["route"] == "fallback"
        else:
            with pytest.raises(openai.APIConnectionError):
                client.chat.completions.create(model=model, messages=messages)
        killer.join()
        assert time.monotonic() - killed_at[0] < 25, "not the 30 s of the cloud"
