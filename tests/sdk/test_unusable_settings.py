"""Unusable settings raise ConfigurationError at construction, instead of a 500 for each request."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from bound_rights import python
from homes import home_in
from router_fakes import FakeCloud
from updraft import OpenAI
from updraft.classifier.online.experience import ExperienceStore
from updraft.embedded.pocket import policy_folder
from updraft.protocol.errors import ConfigurationError, StorageError
from updraft.router.accounting.ledger import Ledger
from updraft.router.config import RouterConfig
from updraft.router.settings_sources import load_config
from updraft.router.storage.answer_store import AnswerStore

CLOUD = {"cloud_url": "http://127.0.0.1:9/v1", "cloud_model": "big"}
POCKET = {"local": "pocket", "cloud_url": "http://127.0.0.1:9/v1", "cloud_model": "pocket-large"}
MIDDLE = {"url": "http://127.0.0.1:9/v1", "model": "middle"}


def _policy(folder: Path, **card: Any) -> dict[str, Any]:
    """The packaged policy with another card."""
    made = folder / "policy"
    shutil.copytree(policy_folder(), made)
    policy_card = json.loads((made / "policy.json").read_text())
    (made / "policy.json").write_text(json.dumps({**policy_card, **card}))
    return {**POCKET, "policy": str(made)}


def _policy_without(folder: Path, pattern: str, content: bytes | None = None) -> dict[str, Any]:
    """The packaged policy, in which a file is missing, or holds something else."""
    settings = _policy(folder)
    (file,) = Path(settings["policy"]).glob(pattern)
    file.unlink() if content is None else file.write_bytes(content)
    return settings


def _newer_ledger(folder: Path) -> dict[str, Any]:
    Ledger(folder / "ledger.sqlite3").close()
    with closing(sqlite3.connect(folder / "ledger.sqlite3")) as connection:
        connection.execute("PRAGMA user_version=99")
    return {**CLOUD, "ledger": folder / "ledger.sqlite3"}


def _file(folder: Path, content: bytes = b"x") -> Path:
    (folder / "a file").write_bytes(content)
    return folder / "a file"


def _moved(folder: Path) -> dict[str, Any]:
    return {"ledger": None, "store": folder / "ledger.sqlite3"}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "an old policy": (lambda folder: _policy(folder, format_version=3), "format_version 3.*updraft calibrate"),
    "a policy of old features": (lambda folder: _policy(folder, feature_version=1), "feature_version 1"),
    "a damaged card": (lambda folder: _policy(folder, rows="many"), "not a valid policy"),
    "a policy without a gate": (lambda folder: _policy_without(folder, "gate1*"), "lacks gate1"),
    "a policy without topics": (lambda folder: _policy_without(folder, "topics*"), "lacks topics"),
    "a policy without rows": (lambda folder: _policy_without(folder, "*.npz"), "lacks calibration"),
    "a damaged gate": (lambda folder: _policy_without(folder, "gate3*", b"x"), "damaged or replaced"),
    "damaged rows": (lambda folder: _policy_without(folder, "*.npz", b"x"), "damaged or replaced"),
    "a card without gates": (lambda folder: _policy(folder, blocks={}), "does not declare the gates"),
    "a card without files": (lambda folder: _policy(folder, files={}), "lacks topics"),
    "no policy": (lambda folder: {**POCKET, "policy": str(folder)}, "policy.json is missing"),
    "a policy of another pair": (
        lambda _: {**POCKET, "cloud_model": "other", "policy": str(policy_folder())},
        "was calibrated for pocket-small with pocket-large",
    ),
    "a policy of other weights": (
        lambda folder: _policy(folder, local_model={"quantization": "Q2_K", "weights": "0", "template": "0"}),
        "answers differently",
    ),
    "a target without a policy": (lambda _: {**CLOUD, "quality": 0.9}, "updraft calibrate"),
    "no model file": (lambda folder: {"local": str(folder / "gone.gguf")}, "there is no file"),
    "no chat template": (lambda folder: {"local": "pocket", "chat_template": str(folder / "gone")}, "chat_template"),
    "no adapter": (lambda _: {"local": "pocket", "local_options": {"adapters": ["/gone.gguf"]}}, "adapters"),
    "a tool parser": (lambda _: {**POCKET, "tool_call_parser": "unknown"}, "tool_call_parser"),
    "threads": (lambda _: {**POCKET, "local_options": {"threads": -1}}, "threads must be"),
    "a KV cache": (lambda _: {**POCKET, "local_options": {"kv_cache_type": "q9"}}, "kv_cache_type"),
    "a key": (lambda _: {**CLOUD, "cloud_api_key": "two words"}, "API key"),
    "a middle tier's key": (lambda _: {**CLOUD, "middle_tiers": [{**MIDDLE, "api_key": "two words"}]}, "API key"),
    "a middle tier's model": (lambda _: {**CLOUD, "middle_tiers": [{**MIDDLE, "model": ""}]}, "middle_tiers.model"),
    "a provider": (lambda _: {**CLOUD, "cloud_provider": "unknown"}, "cloud_provider"),
    "a provider's option": (lambda _: {**CLOUD, "cloud_provider": "gemini", "cloud_continues": True}, "continues"),
    "a folder as ledger": (lambda folder: {**CLOUD, "ledger": folder}, "is a folder"),
    "a device as ledger": (lambda _: {**CLOUD, "ledger": "/dev/null"}, "^ledger: /dev/null is a device"),
    "a device as store": (lambda _: {**CLOUD, "store": "/dev/null"}, "^store: /dev/null is a device"),
    "a cache's size": (lambda _: {**CLOUD, "cache": {"max_mb": 1e308}}, "cache.max_mb must be"),
    "a newer ledger": (_newer_ledger, "format 99"),
    "a missing policy of a cloud": (lambda _: {**CLOUD, "policy": "/gone"}, "no policy at /gone"),
    "a folder as store": (lambda folder: {**CLOUD, "store": folder}, "^store: .* is a folder"),
    "a folder as experience": (lambda folder: {**CLOUD, "experience": folder}, "^experience: .* is a folder"),
    "a file as files": (lambda folder: {**CLOUD, "files": _file(folder)}, "^files: .* is a file"),
    "a ledger as store": (lambda folder: {**_newer_ledger(folder), **_moved(folder)}, "^store: .* is another database"),
    **{
        f"{len(content)} bytes as {setting}": (
            lambda folder, setting=setting, content=content: {**CLOUD, setting: _file(folder, content)},
            f"^{setting}: .* is not an SQLite database",
        )
        for setting in ("store", "experience")
        for content in (b"x", b"xy", b"x" * 5000)
    },
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))


@pytest.mark.parametrize("case", CASES)
def test_the_constructor_refuses(case: str, tmp_path: Path) -> None:
    settings, message = CASES[case]
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        OpenAI(config=load_config(settings(tmp_path)))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("SSL_CERT_FILE", "/gone.pem", "SSL_CERT_FILE=/gone.pem"), ("HTTPS_PROXY", "foo://x", "proxy")],
)
def test_the_environment_is_checked(variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=message):
        OpenAI(cloud_url="https://127.0.0.1:9/v1", cloud_model="big")


@pytest.mark.parametrize("proxy", ["foo://x", "socks5://127.0.0.1:9"])
def test_an_unusable_proxy_leaves_the_local_model(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    messages: Any = [{"role": "user", "content": "hello"}]
    with OpenAI(cloud_url="http://127.0.0.1:9/v1", cloud_model="big", local="pocket", max_retries=0) as client:
        assert client.chat.completions.create(model="local", messages=messages).choices[0].message.content
        with pytest.raises(openai.APIStatusError, match="proxy"):
            client.chat.completions.create(model="cloud", messages=messages)
    with pytest.raises(ConfigurationError, match="API key"):
        OpenAI(cloud_url="http://127.0.0.1:9/v1", cloud_model="big", local="pocket", cloud_api_key="a b")


def test_a_daemon_says_so_in_a_line_and_ends(tmp_path: Path) -> None:
    variables = {"UPDRAFT_HOME": str(tmp_path / "home"), "UPDRAFT_LOCAL": "pocket", "UPDRAFT_POLICY": str(tmp_path)}
    variables |= {"UPDRAFT_CLOUD_URL": CLOUD["cloud_url"], "UPDRAFT_CLOUD_MODEL": CLOUD["cloud_model"]}
    done = python("-m", "updraft", "serve", "--port", "0", **variables)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors), "policy.json is missing" in errors[0]) == (2, 1, True), done
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_loaded_leaves_the_cloud(cloud: FakeCloud, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.gguf")
    with OpenAI(cloud_url=cloud.url, cloud_model="big", local=gone, ledger=None) as client:
        made = client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "hello"}])
    assert made.choices[0].message.content == "The cloud says hello."


def test_a_foreign_policy_of_other_hidden_states_fails_at_the_start(tmp_path: Path) -> None:
    from updraft.router.factory import load_learning_gates

    settings = _policy(tmp_path, models={"local": "another", "cloud": "big"})
    config = load_config({**settings, "allow_foreign_policy": True})
    load_learning_gates(config, "pocket-small")
    with pytest.raises(ConfigurationError, match="hidden states of"):
        load_learning_gates(config, "pocket-small", hidden_size=7)


def test_the_word_none_is_no_ledger(cloud: FakeCloud, tmp_path: Path) -> None:
    for ledger in (None, "none", "", str(tmp_path / "kept.sqlite3")):
        with OpenAI(cloud_url=cloud.url, cloud_model="big", ledger=ledger) as client:
            client.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hello"}])
        assert (tmp_path / "kept.sqlite3").exists() == bool(ledger and ledger != "none")
    assert not (tmp_path / "home" / "ledger.sqlite3").exists()


@pytest.mark.parametrize("make", [Ledger, ExperienceStore, lambda path: AnswerStore(path, days=1, most=1)])
def test_a_text_file_is_never_overwritten(make: Callable[[Path], object], tmp_path: Path) -> None:
    for content in (b"x", b"xy", b"x" * 5000):
        path = _file(tmp_path, content)
        with pytest.raises(StorageError, match="not a database"):
            make(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("make", [OpenAI, RouterConfig])
@pytest.mark.parametrize(("setting", "current"), [("middle", "`middle_tiers`"), ("tool_parser", "`tool_call_parser`")])
def test_a_former_name_is_answered_with_the_current_name(make: Callable[..., Any], setting: str, current: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^`{setting}`.* is now {current}: rename the setting"):
        make(**{setting: ()})
    with pytest.raises(ConfigurationError, match='is now promise = "no-loss"'):
        make(promise="confidence")
