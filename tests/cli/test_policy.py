"""`updraft policy`: what is calibrated here, and whether it fits the models of this machine."""

from __future__ import annotations

import ctypes
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scripted_provider import running_provider
from updraft.classifier.graded_row import GradedRow
from updraft.classifier.policy.policy import Source
from updraft.classifier.training.train import FitRecipe, fit_policy
from updraft.embedded.pocket import pocket_small_gguf
from updraft.protocol.errors import ConfigurationError
from updraft.router.config import RouterConfig
from updraft.router.factory import check_startable, hashed_identity, load_learning_gates

WORDS = ("river", "table", "cloud", "seven", "music", "green", "stone", "paper")


def quantized(kind: int, path: Path) -> Path:
    """The pocket model, requantised by llama.cpp itself."""
    api = pytest.importorskip("llama_cpp.llama_cpp")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = kind, True
    assert api.llama_model_quantize(str(pocket_small_gguf()).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    return {"Q8_0": quantized(7, folder / "q8.gguf"), "Q4_0": quantized(2, folder / "q4.gguf")}


@pytest.fixture(scope="module")
def made(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of "model" as Q8_0 with "big"."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("made")
    model = shutil.copy(files["Q8_0"], folder / "model.gguf")
    rng = np.random.default_rng(0)
    words = [" and the ".join(rng.choice(WORDS, 2)) for _ in range(120)]
    rows = [
        GradedRow(f"Tell me of the {message}, {i}.", float(rng.random() < 0.6), 1.0) for i, message in enumerate(words)
    ]
    config = RouterConfig(local=str(model), cloud_model="big")
    models = {"local": "model", "cloud": "big"}
    recipe = FitRecipe(
        models, [Source("mine.jsonl", "0" * 64, 120)], "test", "2026-01-02", local_model=hashed_identity(config)
    )
    fit_policy(rows, recipe, folder / "policy")
    return folder / "policy"


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """The state folder that `updraft` uses here, with the policy in it."""
    folder = tmp_path / "home" / "policies" / "model--big"
    shutil.copytree(made, folder)
    return folder


def test_a_policy_is_for_one_quantisation(
    files: dict[str, Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    model = tmp_path / "model.gguf"
    config = RouterConfig(local=str(model), cloud_model="big", cloud_url="http://127.0.0.1:9/v1", quality=0.5)
    shutil.copy(files["Q8_0"], model)
    check_startable(config)
    assert load_learning_gates(config, "model").quality == 0.5
    shutil.copy(files["Q4_0"], model)
    with pytest.raises(
        ConfigurationError, match=r"model as Q8_0, but here it runs as Q4_0.*updraft calibrate"
    ) as error:
        load_learning_gates(config, "model")
    assert (error.value.param, error.value.code) == ("policy", "policy_of_another_model")
    named = RouterConfig(local=str(model), cloud_model="big", policy=str(home))
    with pytest.raises(ConfigurationError, match="as Q8_0, but here it runs as Q4_0"):
        load_learning_gates(named, "model")
    foreign = RouterConfig(local=str(model), cloud_model="big", allow_foreign_policy=True)
    assert load_learning_gates(foreign, "model").typical_p_gain is None, "it is used without a promise"
    plain = RouterConfig(local=str(model), cloud_model="big", confidence=0.5)
    load_learning_gates(plain, "model")


def test_a_policy_is_for_one_chat_template(files: dict[str, Path], home: Path, tmp_path: Path) -> None:
    model = shutil.copy(files["Q8_0"], tmp_path / "model.gguf")
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[-1].content }}")
    config = RouterConfig(local=str(model), cloud_model="big", policy=str(home), chat_template=str(template))
    with pytest.raises(ConfigurationError, match=r"Q8_0, chat template \w+, but here it runs as Q8_0, chat template"):
        load_learning_gates(config, "model")


def test_list_and_show(in_process, files: dict[str, Path], home: Path, tmp_path: Path) -> None:
    shutil.copy(files["Q8_0"], tmp_path / "model.gguf")
    settings = {"UPDRAFT_LOCAL": str(tmp_path / "model.gguf"), "COLUMNS": "200"}
    listed = in_process("policy", "list", env=settings)
    assert listed.returncode == 0, listed.stderr
    line = next(line for line in listed.stdout.splitlines() if "model--big" in line)
    for word in ("model with big", " 120 ", "quality 0.98: 100% to the cloud, promise level 90%", "2026-01-02", " yes"):
        assert word in line
    listed = json.loads(in_process("policy", "list", "--json", env=settings).stdout)
    assert [(each["name"], each["rows"], [check["status"] for check in each["checks"]]) for each in listed] == [
        ("model--big", 120, ["ok", "ok"])
    ]
    shown = in_process("policy", "show", "model--big", env=settings).stdout
    assert "model as Q8_0, run by llama-cpp-python" in shown
    assert "Calibrated on mine.jsonl (120 rows): single questions, in Latin script." in shown
    assert "At a promise level of 90%" in shown
    card = json.loads(in_process("policy", "show", "model--big", "--json", env=settings).stdout)["card"]
    assert card["local_model"]["quantization"] == "Q8_0"
    unknown = in_process("policy", "show", "nothing", env=settings)
    assert unknown.returncode == 1
    assert "There is no policy 'nothing'. Known: model--big." in unknown.stderr


def test_verify(updraft, in_process, files: dict[str, Path], home: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    elsewhere = in_process("policy", "verify")
    assert elsewhere.returncode == 0
    assert "there is no local model model to compare with" in elsewhere.stdout
    shutil.copy(files["Q8_0"], model)
    sound = in_process("policy", "verify", "model--big", "--local", str(model))
    assert (sound.returncode, sound.stdout.count("ok ")) == (0, 2), sound.stdout
    data = bytearray(model.read_bytes())
    data[-100] ^= 1
    model.write_bytes(data)
    flipped = in_process("policy", "verify", "--local", str(model))
    assert flipped.returncode == 1
    assert "has another SHA-256 than the calibrated file" in flipped.stdout
    shutil.copy(files["Q4_0"], model)
    other = in_process("policy", "verify", "--local", str(model), "--json")
    assert other.returncode == 1
    (check,) = json.loads(other.stdout)
    assert "as Q8_0, but here it runs as Q4_0" in check["checks"][1]["finding"]
    doctor = updraft("doctor", env={"UPDRAFT_LOCAL": str(model)})
    assert "as Q8_0, but here it runs as Q4_0" in " ".join(doctor.stdout.split())
    graph = next(home.glob("gate1*.onnx"))
    graph.write_bytes(graph.read_bytes()[:-1])
    damaged = in_process("policy", "verify")
    assert damaged.returncode == 1
    assert "damaged or replaced" in damaged.stdout


def test_a_model_behind_a_server_is_asked_for(in_process, home: Path) -> None:
    with running_provider() as provider:
        address = f"{provider.url}/v1"

        def has(name: str, size: int) -> None:
            provider.answers.clear()
            provider.says({"data": [{"id": name, "owned_by": "llamacpp", "meta": {"size": size}}]})
            provider.says({"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]})

        def verified(name: str, size: int, *command: str) -> tuple[int, str]:
            has(name, size)
            done = in_process("policy", *(command or ("verify",)), "--local", address)
            return done.returncode, done.stdout

        has("model", 1)
        made = hashed_identity(RouterConfig(local=address))
        card = home / "policy.json"
        facts = json.loads(card.read_text())
        facts["local_model"] = asdict(made)
        card.write_text(json.dumps(facts))
        code, told = verified("model", 1)
        assert (code, f"{address} serves the calibrated model" in told) == (0, True), told
        assert verified("model", 2)[0] == 1, "other weights"
        code, told = verified("another", 1)
        assert (code, "there is no local model model" in told) == (0, True), told
        asked = len(provider.asked)
        assert "run updraft policy verify" in verified("model", 1, "show", "model--big")[1]
        assert len(provider.asked) == asked
    assert "does not answer" in verified("model", 1)[1]


def test_another_engine_is_a_warning(in_process, files: dict[str, Path], home: Path, tmp_path: Path) -> None:
    card = home / "policy.json"
    facts = json.loads(card.read_text())
    facts["local_model"]["engine"] = "llama-cpp-python 0.1.0"
    card.write_text(json.dumps(facts))
    model = shutil.copy(files["Q8_0"], tmp_path / "model.gguf")
    done = in_process("policy", "verify", "--local", str(model))
    assert done.returncode == 0
    assert "calibrated with llama-cpp-python 0.1.0" in done.stdout


def test_rm(in_process, home: Path) -> None:
    done = in_process("policy", "rm", "model--big", input="")
    assert done.returncode == 2
    assert "add --yes" in done.stderr
    assert home.is_dir()
    for name in ("../policies", "nothing"):
        assert in_process("policy", "rm", name, "--yes").returncode == 1
    done = in_process("policy", "rm", "model--big", "--yes")
    assert (done.returncode, done.stderr) == (0, "Deleted model--big.\n")
    assert not home.exists()
    assert in_process("policy", "list").stderr == "There are no policies yet: create one with updraft calibrate.\n"
