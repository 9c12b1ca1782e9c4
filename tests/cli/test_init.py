"""`updraft init`: both models are tried, the key is shown to nobody, and settings are never replaced silently."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import at_terminal

KEY = "secret-key"


@pytest.fixture
def cloud(fake_cloud) -> Iterator[str]:
    with fake_cloud() as url:
        yield url


@pytest.fixture
def home(environment: dict[str, str]) -> Path:
    return Path(environment["UPDRAFT_HOME"])


def settings_in(home: Path) -> dict[str, object]:
    return tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))


def private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_cloud_by_options(updraft, cloud: str, home: Path) -> None:
    flags = ["--yes", "--cloud-url", cloud, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]
    done = updraft("init", *flags, env={"CLOUD_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert "The cloud model big answers" in done.stderr
    key_file = home / "cloud_api_key"
    assert settings_in(home) == {
        "local": "none", "cloud_url": cloud, "cloud_model": "big", "cloud_api_key_file": str(key_file),
    }  # fmt: skip
    assert key_file.read_text() == f"{KEY}\n"
    assert f"The key is stored in {key_file}, which only you can read." in done.stderr
    assert private(key_file)
    assert private(home / "config.toml")
    assert KEY not in done.stdout + done.stderr + (home / "config.toml").read_text()
    assert updraft("ask", "Capital of France?").stdout == "Paris\n"


def test_a_local_model_by_options(updraft, home: Path) -> None:
    pytest.importorskip("llama_cpp")
    done = updraft("init", "--yes", "--local", "pocket")
    assert done.returncode == 0, done.stderr
    assert "The local model pocket answers" in done.stderr
    assert settings_in(home) == {"local": "pocket"}


def test_a_pulled_model_goes_by_its_name(updraft, home: Path, cloud: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    packaged = Path(__file__).resolve().parents[2] / "embedded" / "weights" / "pocket-small.gguf"
    assert updraft("pull", str(packaged), "--name", "mine").returncode == 0
    key_file = tmp_path / "my.key"
    key_file.write_text(KEY)
    flags = ["--cloud-url", cloud, "--cloud-model", "big", "--api-key-file", str(key_file)]
    done = updraft("init", "--yes", "--local", "mine", *flags)
    assert done.returncode == 0, done.stderr
    settings = settings_in(home)
    assert (settings["local"], settings["cloud_api_key_file"]) == ("mine", str(key_file))
    assert not (home / "cloud_api_key").exists() and "stored" not in done.stderr
    assert "updraft calibrate --live" in done.stderr


def test_a_person_is_asked(environment, cloud: str, home: Path, tmp_path: Path) -> None:
    answers = [("Local model [smollm2]", "none"), ("[none]", cloud), ("of the cloud", "big"), ("for none): ", KEY)]
    code, shown = at_terminal(["init"], answers, environment, tmp_path)
    assert code == 0, shown
    assert KEY not in shown
    assert settings_in(home)["cloud_model"] == "big"
    assert (home / "cloud_api_key").read_text() == f"{KEY}\n"
    code, shown = at_terminal(["init"], [("[y/N]", "n")], environment, tmp_path)
    assert (code, "Replace these settings?" in shown) == (1, True)
    code, _ = at_terminal(["init"], [("[y/N]", "\x03")], environment, tmp_path)
    assert code == 130
    assert settings_in(home)["cloud_model"] == "big"


def test_settings_are_not_replaced_silently(in_process, cloud: str, home: Path) -> None:
    (home / "config.toml").write_text("offline = true\n")
    flags = ["--yes", "--cloud-url", cloud, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]
    refused = in_process("init", *flags, env={"CLOUD_KEY": KEY})
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert settings_in(home) == {"offline": True}
    assert in_process("init", *flags, "--force", env={"CLOUD_KEY": KEY}).returncode == 0
    assert settings_in(home)["cloud_url"] == cloud
    assert (home / "config.toml.old").read_text() == "offline = true\n"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "Name a model"),
        (["--cloud-url", "URL"], 2, "needs --cloud-model"),
        (["--cloud-url", "URL", "--cloud-model", " "], 2, "needs --cloud-model"),
        (["--api-key-env", "CLOUD_KEY"], 2, "need --cloud-url"),
        (["--local", "pocket", "--cloud-model", "big"], 2, "need --cloud-url"),
        (["--cloud-url", "URL", "--cloud-model", "big", "--api-key-env", "NOT_SET"], 2, "not set"),
        (["--cloud-url", "URL", "--cloud-model", "big", "--api-key-file", "absent"], 2, "cannot be read"),
        (["--cloud-url", "URL", "--cloud-model", "big", "--api-key-file", "empty"], 2, "is empty"),
        (["--cloud-url", "URL", "--cloud-model", "big", "--api-key-file", "wrong"], 1, "That key is unknown here."),
        (["--cloud-url", "ftp://x", "--cloud-model", "big"], 2, "must start with http"),
        (["--local", "absent.gguf"], 1, "no local model"),
    ],
)
def test_nothing_is_written_unless_all_of_it_works(
    in_process, cloud: str, home: Path, tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "wrong").write_text("sk-wrong")
    done = in_process("init", "--yes", *[cloud if flag == "URL" else flag for flag in flags], env={"CLOUD_KEY": KEY})
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "sk-wrong" not in done.stderr
    assert not (home / "config.toml").exists()
    assert not (home / "cloud_api_key").exists()


def test_old_settings_keep_their_keys(in_process, cloud: str, home: Path) -> None:
    flags = ["--yes", "--force", "--cloud-url", cloud, "--cloud-model", "big"]
    assert in_process("init", *flags, "--api-key-env", "CLOUD_KEY", env={"CLOUD_KEY": KEY}).returncode == 0
    (home / "cloud_api_key").write_text("an older key\n")
    for _ in range(2):
        assert in_process("init", *flags, "--api-key-env", "CLOUD_KEY", env={"CLOUD_KEY": KEY}).returncode == 0
    backups = [tomllib.loads((home / f"config.toml{end}").read_text()) for end in (".old", ".old-2", "")]
    keys = [Path(each["cloud_api_key_file"]) for each in backups]
    assert [each.name for each in keys] == ["cloud_api_key", "cloud_api_key-2", "cloud_api_key-2"]
    assert [each.read_text() for each in keys] == ["an older key\n", f"{KEY}\n", f"{KEY}\n"]
    assert private(keys[1])
