"""Definitions of the service that the systems themselves would read back as meant, whatever stands in a path."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from updraft.cli.service.units import ServiceSpec, launchd_plist, systemd_unit, windows_task
from updraft.protocol.errors import ConfigurationError

COMMAND = ("/bin/true", "-m", "updraft", "serve", "--log-file", '/home/a b/100% "of" $HOME\\x/é')
SPEC = ServiceSpec(COMMAND, {"UPDRAFT_HOME": "/home/a b/%h"}, Path("/tmp/a b.out"))
NAMESPACE = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}


def test_systemd_reads_its_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "updraft.service"
    unit.write_text(systemd_unit(SPEC))
    done = subprocess.run([analyze, "--user", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    ours = [line for line in done.stderr.splitlines() if str(unit) in line or "updraft.service" in line]
    assert not ours, done.stderr


def test_a_unit_escapes_what_systemd_would_expand() -> None:
    (line,) = [line for line in systemd_unit(SPEC).splitlines() if line.startswith("ExecStart=")]
    assert line.endswith('"/home/a b/100%% \\"of\\" $$HOME\\\\x/é"')
    assert 'Environment="UPDRAFT_HOME=/home/a b/%%h"' in systemd_unit(SPEC)


def test_launchd_gets_the_same_command() -> None:
    agent = plistlib.loads(launchd_plist(SPEC).encode())
    assert agent["ProgramArguments"] == list(COMMAND)
    assert agent["EnvironmentVariables"] == dict(SPEC.environment)
    assert agent["RunAtLoad"] is True


def test_windows_gets_the_same_command() -> None:
    task = ElementTree.fromstring(windows_task(SPEC))
    arguments = task.findtext("t:Actions/t:Exec/t:Arguments", namespaces=NAMESPACE)
    assert arguments is not None
    assert subprocess.list2cmdline(COMMAND) in arguments
    assert 'set "UPDRAFT_HOME=/home/a b/%h" && ' in arguments
    assert task.find("t:Triggers/t:LogonTrigger", NAMESPACE) is not None


def test_a_line_break_cannot_add_a_directive() -> None:
    with pytest.raises(ConfigurationError, match="line break"):
        ServiceSpec(("/bin/true", "a\nExecStartPost=/bin/evil"), {}, Path("/tmp/out"))
