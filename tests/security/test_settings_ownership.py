"""Settings files that cannot be changed are read; one that anyone can change is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bound_rights import needs_mounts, of_another_user, python
from updraft.protocol import settings

LOOK = """
import json, sys
from updraft.router.settings_sources import load_config
from updraft.protocol.errors import ConfigurationError
try:
    print(json.dumps(load_config().cloud_model))
except ConfigurationError as error:
    print(json.dumps({"error": error.message}))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings file of a home folder that everybody can search."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    file = tmp_path / ".config" / "updraft" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('cloud_url = "http://127.0.0.1:9/v1"\ncloud_model = "mine"\n')
    return file


def _read(home: Path, **variables: str) -> object:
    done = python("-c", LOOK, HOME=str(home), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_own_file_is_made_private_and_stays_read_only(config: Path, tmp_path: Path) -> None:
    config.chmod(0o444)
    assert _read(tmp_path) == "mine"
    assert config.stat().st_mode & 0o777 == 0o400


def test_a_read_only_file_of_another_user_is_read(config: Path, tmp_path: Path) -> None:
    of_another_user(config, 0o444)
    of_another_user(config.parent, 0o555)
    assert _read(tmp_path) == "mine"
    assert config.stat().st_mode & 0o777 == 0o444


def test_a_mounted_map_with_links_is_read(config: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: links to a folder that is replaced as a whole, all of it read-only."""
    needs_mounts()
    folder = config.parent
    build = f"mount -t tmpfs tmpfs {folder} && mkdir {folder}/..1 && cd {folder} && ln -s ..1 ..data"
    build += ' && ln -s ..data/config.toml config.toml && printf \'cloud_url="http://127.0.0.1:9/v1"\\n'
    build += 'cloud_model="mapped"\\n\' > ..1/config.toml && chmod 666 ..1/config.toml && chown 65534 ..1/config.toml'
    assert _read(tmp_path, mount=f"{build} && mount -o remount,ro {folder}") == "mapped"


def test_a_file_that_everybody_can_change_is_refused(config: Path, tmp_path: Path) -> None:
    of_another_user(config, 0o666)
    settings = _read(tmp_path)
    assert isinstance(settings, dict) and "anyone can change" in settings["error"]


def test_a_file_that_cannot_be_read_is_an_error(config: Path, tmp_path: Path) -> None:
    of_another_user(config, 0o600)
    settings = _read(tmp_path)
    assert isinstance(settings, dict) and "Permission denied" in settings["error"]


def test_a_hidden_folder_holds_no_settings_but_a_named_file_has_to_be_read(config: Path, tmp_path: Path) -> None:
    of_another_user(config.parent, 0o700)
    assert _read(tmp_path) == ""
    settings = _read(tmp_path, UPDRAFT_CONFIG=str(config))
    assert isinstance(settings, dict) and "Permission denied" in settings["error"]


def test_a_user_without_a_home_has_no_state_in_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "UPDRAFT_HOME", "UPDRAFT_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no entry"])
    for folder in (settings.state_folder(), settings.config_file(), *settings.own_folders()):
        assert folder.is_absolute()
