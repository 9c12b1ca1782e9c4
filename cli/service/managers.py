"""Service managers: systemd, launchd and the Task Scheduler, each through its command-line tool."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.safety.private_files import write_private
from .units import LABEL, ServiceSpec, launchd_plist, systemd_unit, windows_task

_TIMEOUT_S = 30.0
_UNIT = f"{LABEL}.service"
_NO_SERVICE = "No service can be installed: run `updraft serve` yourself or under another supervisor."


def service_manager() -> Systemd | Launchd | TaskScheduler:
    """Return the service manager of this system. Raises ConfigurationError if the system has no systemctl.

    `install` replaces a running service. Methods raise ConfigurationError with the output of a failed system command.
    """
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "win32":
        return TaskScheduler()
    if shutil.which("systemctl") is None:
        raise ConfigurationError(f"This system has no systemctl. {_NO_SERVICE}")
    return Systemd()


class Systemd:
    """systemd user unit; starts at login, or at boot after `loginctl enable-linger`."""

    @property
    def definition(self) -> Path:
        import platformdirs

        return Path(platformdirs.user_config_dir("systemd")) / "user" / _UNIT

    def install(self, spec: ServiceSpec) -> None:
        _write(self.definition, systemd_unit(spec))
        try:
            _run("systemctl", "--user", "daemon-reload")
        except ConfigurationError as error:
            self.definition.unlink()
            raise ConfigurationError(f"systemd does not run for this user. {_NO_SERVICE} {error.message}") from error
        _run("systemctl", "--user", "enable", _UNIT)
        _run("systemctl", "--user", "restart", _UNIT)

    def uninstall(self) -> None:
        _run("systemctl", "--user", "disable", "--now", _UNIT)
        self.definition.unlink(missing_ok=True)
        _run("systemctl", "--user", "daemon-reload")

    def status(self) -> str:
        return _run("systemctl", "--user", "is-active", _UNIT, fails=True) or "unknown"


class Launchd:
    """Launch agent of the user."""

    @property
    def definition(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def install(self, spec: ServiceSpec) -> None:
        if self.definition.exists():
            _run("launchctl", "unload", str(self.definition), fails=True)
        _write(self.definition, launchd_plist(spec))
        _run("launchctl", "load", "-w", str(self.definition))

    def uninstall(self) -> None:
        _run("launchctl", "unload", "-w", str(self.definition))
        self.definition.unlink(missing_ok=True)

    def status(self) -> str:
        return "active" if '"PID"' in _run("launchctl", "list", LABEL, fails=True) else "inactive"


class TaskScheduler:
    """Task of the Task Scheduler that starts at logon."""

    @property
    def definition(self) -> Path:
        import platformdirs

        return Path(platformdirs.user_data_dir("updraft", appauthor=False)) / "service.xml"

    def install(self, spec: ServiceSpec) -> None:
        _write(self.definition, windows_task(spec))
        _run("schtasks", "/Create", "/F", "/TN", LABEL, "/XML", str(self.definition))
        _run("schtasks", "/Run", "/TN", LABEL)

    def uninstall(self) -> None:
        _run("schtasks", "/End", "/TN", LABEL, fails=True)
        _run("schtasks", "/Delete", "/F", "/TN", LABEL)
        self.definition.unlink(missing_ok=True)

    def status(self) -> str:
        listed = _run("schtasks", "/Query", "/TN", LABEL, "/FO", "CSV", "/NH", fails=True)
        return listed.strip().rpartition(",")[2].strip('"').lower() or "unknown"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, text)


def _run(*command: str, fails: bool = False) -> str:
    """Run `command` and return its output. `fails`: whether a non-zero exit code is accepted."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"`{' '.join(command)}` could not run: {error}.") from error
    if done.returncode and not fails:
        printed = (done.stderr or done.stdout).strip()[:500]
        raise ConfigurationError(f"`{' '.join(command)}` failed with code {done.returncode}: {printed}")
    return done.stdout.strip()
