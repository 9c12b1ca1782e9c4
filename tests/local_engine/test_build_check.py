"""A broken llama.cpp build is found and named without taking this process down."""

import importlib.util

import pytest
from homes import home_in
from updraft.local_engine import build_check as probe_module
from updraft.local_engine.build_check import ProbeReport, ensure_usable_build, probe
from updraft.local_engine.llama.build import REBUILD_COMMAND
from updraft.local_engine.llama.library import llama
from updraft.protocol.errors import ConfigurationError, MissingDependencyError


@pytest.fixture
def fake_llama_cpp(tmp_path, monkeypatch):
    """Replaces llama_cpp, in subprocesses only, by a package with the given code."""

    def make(code: str) -> None:
        package = tmp_path / "llama_cpp"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_working_build(tiny, tmp_path, monkeypatch):
    report = probe(tiny.gguf)
    assert report.status == "ok", report
    assert report.tokens_per_s is not None
    assert report.tokens_per_s > 0
    assert "SSE3" in report.system_info or "NEON" in report.system_info
    assert "OPENMP = 1" not in report.system_info
    assert report.advice == ""


def test_success_is_remembered_and_failure_is_not(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))
    with pytest.raises(ConfigurationError, match="Cannot open"):
        ensure_usable_build(tmp_path / "none.gguf")
    ensure_usable_build(tiny.gguf)
    broken = ProbeReport("crashed", "llama.cpp crashed with SIGILL.", "Rebuild it.")
    monkeypatch.setattr(probe_module, "probe", lambda path: broken)
    ensure_usable_build(tiny.gguf)
    (tmp_path / "home" / "llama-build-ok").write_text("another build")
    with pytest.raises(ConfigurationError, match=r"SIGILL\. Rebuild"):
        ensure_usable_build(tiny.gguf)


def test_a_state_folder_that_cannot_be_written_stops_nothing(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "file" / "home"))
    ensure_usable_build(tiny.gguf)
    (tmp_path / "llama-build-ok").mkdir()
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    ensure_usable_build(tiny.gguf)


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed", "SIGILL"),
        ("raise SystemExit(3)", "failed", "code 3"),
        ("raise OSError('libllama.so: cannot open')", "import_failed", "libllama.so"),
        ("import time; time.sleep(60)", "timeout", "3 s"),
    ],
)
def test_broken_builds(tiny, fake_llama_cpp, code, status, detail):
    fake_llama_cpp(code)
    report = probe(tiny.gguf, timeout_s=3 if status == "timeout" else 60)
    assert report.status == status, report
    assert detail in report.detail
    assert REBUILD_COMMAND in report.advice


def test_missing_build(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert probe(tiny.gguf).status == "not_installed"
    with pytest.raises(MissingDependencyError, match=REBUILD_COMMAND):
        ensure_usable_build(tiny.gguf)
    assert list(tmp_path.iterdir()) == []


def test_the_kernels_that_serve_are_reported(tiny, monkeypatch):
    assert probe(tiny.gguf).kernels == llama().kernels
    monkeypatch.setenv("UPDRAFT_LLAMA_KERNELS", "off")
    assert probe(tiny.gguf).kernels.names == ()


def test_kernels_with_wrong_results_are_no_usable_build(tiny, tmp_path, monkeypatch):
    """The self-check runs in the subprocess; here it finds that attention is wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "from updraft.local_engine.llama import self_check\nself_check.wrong_kernels = lambda *_: ('attention',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = probe(tiny.gguf)
    assert report.status == "failed"
    assert "attention" in report.detail
    assert "UPDRAFT_LLAMA_KERNELS=off" in report.advice
