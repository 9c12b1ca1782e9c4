"""The tables of `--config` set the options of servers, below the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner
from updraft.cli.main import app
from updraft.cloud_engine.gateway import process as gateway
from updraft.cloud_engine.node import process as node
from updraft.protocol.errors import ConfigurationError
from updraft.router.settings_sources import load_config


def run(monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> Any:
    """The options that a server would run with."""
    taken: list[Any] = []
    monkeypatch.setattr(node, "run_node", taken.append)
    monkeypatch.setattr(gateway, "run_gateway", taken.append)
    CliRunner().invoke(app, [*arguments, "--config", str(file)], catch_exceptions=False)
    return taken[0] if taken else None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cloud.toml"


def test_one_file_serves_node_and_gateway(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text(
        '[node]\nmodel = "pocket"\nmax_num_seqs = 5\nenforce_eager = true\ndrain_timeout_s = 3\nscheduling_policy = '
        '"priority"\n[gateway]\nnode = ["http://a", "http://b"]\nno_auth = true\nhedge_after_s = 0.5\n'
    )
    started = run(monkeypatch, file, "node", "--drain-timeout-s", "4")
    assert (started.engine.max_num_seqs, started.engine.enforce_eager) == (5, True)
    assert started.engine.scheduling_policy == "priority"
    assert started.drain_timeout_s == 4
    opened = run(monkeypatch, file, "gateway")
    assert (list(opened.nodes), opened.no_auth) == (["http://a", "http://b"], True)
    assert opened.timeouts.hedge_after_s == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\nmax_num_seq = 5", "Did you mean max_num_seqs"),
        ("[node]\nmax_batch_size = 5", "is now max_num_seqs"),
        ("[node]\ncuda_graphs = false", "is now enforce_eager, with the opposite value"),
        ("[node]\nnonsense = 5", "--help-all lists the options"),
        ("[node]\nconfig = 'x'", "Unknown option config"),
        ("max_num_seqs = 5", "Its tables are"),
        ("node = 5", r"must be a table: \[node\]"),
        ("[node]\nrestart = 1", "true or false"),
        ("[node]\nmodel = true", "a text or a number"),
        ("[node]\nmodel = ['a']", "a text or a number"),
        ("[node]\nallowed_hosts = 'a'", "must be a list"),
        ("[node]\nallowed_host = ['a']", "is now allowed_hosts"),
    ],
)
def test_a_wrong_table_is_refused(monkeypatch: pytest.MonkeyPatch, file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        run(monkeypatch, file, "node", "--model", "pocket")


def test_values_are_checked_as_on_the_command_line(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text('[node]\nmodel = "pocket"\nport = 4.5')
    assert run(monkeypatch, file, "node") is None


def test_servers_take_every_option_in_their_table(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    for name in ("node", "gateway"):
        for param in vars(typer.main.get_command(app))["commands"][name].params:
            if not param.is_eager:
                file.write_text(f"[{name}]\n{param.opts[0].removeprefix('--').replace('-', '_')} = 2099-01-01")
                try:
                    run(monkeypatch, file, name)
                except ConfigurationError as error:
                    assert "Unknown option" not in str(error)


def test_the_settings_file_has_a_table_of_serve(updraft, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('local = "pocket"\nconfidence = 0.5\n[serve]\nport = 0\nssl_certfile = "cert.pem"\n')
    done = updraft("serve", "--config", str(file))
    assert (done.returncode, "--ssl-certfile and --ssl-keyfile go together" in done.stderr) == (2, True)
    file.write_text("[serve]\nprot = 0\n")
    assert "Did you mean port?" in updraft("serve", env={"UPDRAFT_CONFIG": str(file)}).stderr
    file.write_text('[serve]\npromise = "confidence"\n')
    assert 'is now promise = "no-loss"' in updraft("serve", "--config", str(file)).stderr


def test_the_router_leaves_the_table_of_serve_alone(file: Path) -> None:
    file.write_text('local = "pocket"\n[serve]\nport = 1\n')
    assert load_config(environ={}, file=file).local == "pocket"
