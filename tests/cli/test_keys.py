"""`updraft keys`: a key is printed once, only its hash is kept, and six that are made at once are all there."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from updraft.cloud_engine.gateway.access.keys import KeyStore
from updraft.protocol.errors import AuthenticationError


def test_a_key_is_printed_once_and_only_its_hash_is_kept(updraft, tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite3"
    made = updraft("keys", "create", "team-a", "--keys", str(file))
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    principal = KeyStore(file).principal(f"Bearer {key}")
    assert (principal.name, principal.tenant, principal.scopes) == ("team-a", "team-a", ("inference",))
    assert not [path for path in tmp_path.glob("keys.sqlite3*") if key.encode() in path.read_bytes()]
    assert file.stat().st_mode & 0o077 == 0


def test_every_option_reaches_the_key(in_process, tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite3"
    options = (
        "--scope", "usage", "--scope", "admin", "--tenant", "t", "--model", "m", "--model", "n", "--priority", "batch",
        "--requests-per-minute", "1", "--tokens-per-minute", "2", "--max-concurrency", "3", "--usd-per-day", "4",
        "--usd-per-month", "5.5", "--expires-in-days", "1", "--keys", str(file), "--json",
    )  # fmt: skip
    made = json.loads(in_process("keys", "create", "nightly", *options).stdout)
    key = made.pop("key")
    (listed,) = json.loads(in_process("keys", "list", "--keys", str(file), "--json").stdout)
    assert listed == made
    assert 86_399 < listed["expires_at"] - listed["created_at"] < 86_401
    limits = {
        "requests_per_minute": 1,
        "tokens_per_minute": 2,
        "max_concurrency": 3,
        "usd_per_day": 4,
        "usd_per_month": 5.5,
    }
    expected = {"name": "nightly", "tenant": "t", "scopes": ["usage", "admin"], "priority": "batch"}
    expected |= {"models": ["m", "n"], "limits": limits}
    assert {name: listed[name] for name in expected} == expected
    principal = KeyStore(file).principal(f"Bearer {key}")
    assert (principal.models, principal.limits.usd_per_month) == (("m", "n"), 5.5)


def test_rotation_revocation_and_the_audit_log(in_process, tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite3"
    there = ("--keys", str(file))
    first = in_process("keys", "create", "team-a", *there).stdout.strip()
    second = in_process("keys", "rotate", "team-a", *there).stdout.strip()
    third = in_process("keys", "rotate", "team-a", "--overlap-s", "3600", *there).stdout.strip()
    store = KeyStore(file)
    assert store.principal(f"Bearer {second}") == store.principal(f"Bearer {third}")
    with pytest.raises(AuthenticationError):
        store.principal(f"Bearer {first}")
    assert in_process("keys", "create", "team-a", *there).returncode == 2, "a name has one key"
    assert in_process("keys", "revoke", "team-a", *there).returncode == 0
    again = in_process("keys", "revoke", "team-a", *there)
    assert (again.returncode, "There is no key 'team-a'" in again.stderr) == (1, True)
    for key in (second, third):
        with pytest.raises(AuthenticationError):
            KeyStore(file).principal(f"Bearer {key}")
    entries = json.loads(in_process("keys", "audit", "--json", *there).stdout)
    assert [entry["action"] for entry in entries] == ["revoke", "rotate", "rotate", "create"]
    assert all("on this machine" in entry["actor"] and entry["name"] == "team-a" for entry in entries)
    with closing(sqlite3.connect(file)) as connection:
        for change in ("DELETE FROM audit", "UPDATE audit SET actor = 'nobody'"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(change)


def test_six_that_are_made_at_once_are_all_there(environment, tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite3"
    command = [sys.executable, "-m", "updraft", "keys", "create", "--keys", str(file)]
    running = [
        subprocess.Popen([*command, f"key-{number}"], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(6)
    ]
    keys = [process.communicate()[0].strip() for process in running]
    store = KeyStore(file)
    assert [store.principal(f"Bearer {key}").name for key in keys] == [f"key-{number}" for number in range(6)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "two words"], "name"),
        (["create", "a", "--scope", "root"], "'root'"),
        (["create", "a", "--model", ""], "models"),
        (["create", "a", "--usd-per-day", "inf"], "usd_per_day"),
        (["list"], "does not exist: create a key"),
        (["revoke", "a"], "does not exist: create a key"),
    ],
)
def test_a_wrong_call_is_refused_and_makes_no_file(in_process, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = in_process("keys", *arguments, "--keys", str(tmp_path / "keys.sqlite3"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "keys.sqlite3").exists()


def test_a_file_that_is_no_database_is_left_as_it_is(in_process, tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite3"
    file.write_text("team-a:" + "0" * 64)
    done = in_process("keys", "create", "b", "--keys", str(file))
    assert (done.returncode, "as the key database" in done.stderr) == (2, True)
    assert file.read_text() == "team-a:" + "0" * 64
