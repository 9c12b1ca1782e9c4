"""A node writes and serves no key and no prompt: not in its log, not in metrics, not in what `ps` shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
from tiny_model import write_model

ROOT = Path(__file__).parents[3]
KEY, PROMPT = "canary-node-key", "canary-prompt"


def test_keys_and_prompts_are_shown_nowhere(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), "UPDRAFT_NODE_API_KEY": KEY}
    command = [sys.executable, "-m", "updraft", "node", "--model", str(tmp_path / "model"), "--port", "0"]
    headers = {"authorization": f"Bearer {KEY}"}
    with (tmp_path / "log").open("w") as log:
        node = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        with node, httpx.Client(headers=headers, timeout=120) as client:
            try:
                assert node.stdout is not None
                url = node.stdout.readline().split()[1]
                model = client.get(f"{url}/v1/models").json()["data"][0]["id"]
                body = {"model": model, "prompt": PROMPT, "max_tokens": 2}
                chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
                answers = [
                    client.post(f"{url}/v1/completions", json={**body, **more})
                    for more in (
                        {}, {"stream": True}, {"n": 99}, {"structured_outputs": {"regex": f"({PROMPT}"}},
                        {"prompt": PROMPT * 1000}, {"model": "x"}, {"stop": 5}, {"user": PROMPT * 200},
                    )
                ]  # fmt: skip
                answers += [client.post(f"{url}/v1/chat/completions", json=chat)]
                answers += [
                    client.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}x"})
                ]
                shown = [client.get(f"{url}{path}").text for path in ("/metrics", "/health", "/v1/models", "/spent/x")]
                processes = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
                shown += [word for process in processes for word in process.cmdline()]
            finally:
                node.terminate()
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404}
    errors = [answer.text for answer in answers if answer.status_code != 200]
    assert not [text for text in (*shown, *errors, (tmp_path / "log").read_text()) if KEY in text]
    assert not [text for text in (*shown, (tmp_path / "log").read_text()) if PROMPT in text]
    assert all(len(text) < 5000 for text in errors)
