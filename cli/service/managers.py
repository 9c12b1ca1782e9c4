"""Keepers of a background service: systemd, launchd or the Task Scheduler, each by its own command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...protocol.errors import ConfigurationError
from ...protocol.safety.private_files import write_private
from .units import LABEL, ServiceSpec, launchd_plist, systemd_unit, windows_task

_TIMEOUT_S = 30.0
_UNIT = f"{LABEL}.service"
_NO_SERVICE = "So no service can be installed: run `updraft serve`, or let your own supervisor run it."


class ServiceManager(Protocol):
    """One way to run a service. All methods raise ConfigurationError, with what the system's command printed."""

    @property
    def definition(self) -> Path:
        """The file that describes the service."""
        ...

    def install(self, spec: ServiceSpec) -> None:
        """Write the definition and start the service, in place of one that runs."""
        ...

    def uninstall(self) -> None:
        """Stop the service and remove its definition."""
        ...

    def status(self) -> str:
        """The system's word for its state."""
        ...


def service_manager(platform: str = sys.platform) -> ServiceManager:
    """The one of this system. Raises ConfigurationError where there is none."""
    if platform == "darwin":
        return Launchd()
    if platform == "win32":
        return TaskScheduler()
    if shutil.which("systemctl") is None:
        raise ConfigurationError(f"This system has no systemctl. {_NO_SERVICE}")
    return Systemd()


@dataclass(frozen=True, slots=True)
class Systemd:
    """A user unit. It starts at login, and at boot after `loginctl enable-linger`."""

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
            raise ConfigurationError(
                f"systemd does not run here for this user. {_NO_SERVICE} {error.message}"
            ) from error
        _run("systemctl", "--user", "enable", _UNIT)
        _run("systemctl", "--user", "restart", _UNIT)

    def uninstall(self) -> None:
        _run("systemctl", "--user", "disable", "--now", _UNIT)
        self.definition.unlink(missing_ok=True)
        _run("systemctl", "--user", "daemon-reload")

    def status(self) -> str:
        return _run("systemctl", "--user", "is-active", _UNIT, fails=True) or "unknown"


@dataclass(frozen=True, slots=True)
class Launchd:
    """A launch agent of the user."""

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


@dataclass(frozen=True, slots=True)
class TaskScheduler:
    """A task that starts at logon."""

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
    """The output of `command`. `fails`: whether it may fail."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"`{' '.join(command)}` did not work: {error}.") from error
    if done.returncode and not fails:
        printed = (done.stderr or done.stdout).strip()[:500]
        raise ConfigurationError(f"`{' '.join(command)}` failed with code {done.returncode}: {printed}")
    return done.stdout.strip()
