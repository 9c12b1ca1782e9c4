"""Coding agents complete a task against the daemon: each writes a file. `make interop` installs them into out/."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from interop_cloud import WRITTEN

INSTALLED = Path(os.environ.get("INTEROP_AGENTS", "out/interop/agents"))

OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "permission": {"*": "allow"},
    "model": "updraft/cloud",
    "small_model": "updraft/cloud",
    "provider": {
        "updraft": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$URL", "apiKey": "any"},
            "models": {"cloud": {"name": "cloud"}},
        }
    },
}
AIDER_QUIET = ("--no-check-update", "--analytics-disable", "--no-show-model-warnings")
CODEX = """
model = "cloud"
model_provider = "updraft"
[model_providers.updraft]
name = "Updraft"
base_url = "$URL"
wire_api = "responses"
"""


@dataclass(frozen=True)
class Agent:
    """A coding agent and its settings. `$URL` is the daemon's address with /v1, `$ROOT` the one without."""

    program: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    # Path in the home folder and text.
    settings: tuple[str, str] | None = None
    # Whether the agent prints the model's last message.
    prints_answer: bool = True


AGENTS = {
    "codex": Agent(
        "node_modules/.bin/codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        settings=(".codex/config.toml", CODEX),
    ),
    "opencode": Agent(
        "node_modules/.bin/opencode", ("run",), settings=(".config/opencode/opencode.json", json.dumps(OPENCODE))
    ),
    "qwen-code": Agent(
        "node_modules/.bin/qwen",
        ("--yolo", "--auth-type", "openai", "-p"),
        {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": "$URL", "OPENAI_MODEL": "cloud"},
    ),
    "claude-code": Agent(
        "node_modules/.bin/claude",
        ("-p", "--model", "cloud", "--allowedTools", "Write", "--"),
        {
            "ANTHROPIC_BASE_URL": "$ROOT",
            "ANTHROPIC_API_KEY": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "aider": Agent(
        "aider/bin/aider",
        ("--model", "openai/cloud", "--edit-format", "whole", "--yes-always", "--no-git", *AIDER_QUIET, "--message"),
        {"OPENAI_API_BASE": "$URL", "OPENAI_API_KEY": "any"},
        prints_answer=False,
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_writes_a_file(name: str, daemon: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    program = (INSTALLED / agent.program).absolute()
    if not program.exists():
        pytest.skip(f"{name} is not installed: make interop")

    def addressed(text: str) -> str:
        return text.replace("$URL", daemon).replace("$ROOT", daemon.removesuffix("/v1"))

    added = {key: addressed(value) for key, value in agent.environment.items()}
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    settings = agent.settings or ("empty", "")
    (home / settings[0]).parent.mkdir(parents=True)
    (home / settings[0]).write_text(addressed(settings[1]))
    # Other variables could carry settings of an agent on the developer's own machine.
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TERM", "TMPDIR")}
    done = subprocess.run(
        [program, *agent.arguments, f"Write the file {work}/hello.txt with the text hello."],
        cwd=work,
        env={**kept, "HOME": str(home), **added},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "hello.txt").read_text() == "hello\n", done.stdout + done.stderr
    assert WRITTEN in done.stdout or not agent.prints_answer
