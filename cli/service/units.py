"""Definitions of a background service for systemd, launchd and Windows' Task Scheduler."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ...protocol.errors import ConfigurationError

LABEL = "updraft"
DESCRIPTION = "Updraft: local OpenAI-compatible server"
_TASKS = "http://schemas.microsoft.com/windows/2004/02/mit/task"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Description of the background service."""

    # Absolute path of the program, and its arguments. Holds no secrets.
    command: tuple[str, ...]
    # Environment variables to add to the user's environment.
    environment: Mapping[str, str]
    # File for standard output and standard error.
    output: Path

    def __post_init__(self) -> None:
        for text in (*self.command, *self.environment.values(), str(self.output)):
            if any(character in text for character in "\n\r\0"):
                raise ConfigurationError(f"A service definition cannot contain line breaks: {text[:80]!r}.")


def systemd_unit(spec: ServiceSpec) -> str:
    """Return a user unit (systemd.service(5)) that restarts on failure and stops by SIGTERM, which drains requests."""
    environment = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in sorted(spec.environment.items())
    )
    return (
        "[Unit]\n"
        f"Description={DESCRIPTION}\n"
        "After=network.target\n"
        "\n"
        "[Service]\n"
        f"ExecStart={' '.join(_quoted(part.replace('$', '$$')) for part in spec.command)}\n"
        f"{environment}"
        "ExecReload=/bin/kill -HUP $MAINPID\n"
        f"StandardOutput=append:{_specifier(str(spec.output))}\n"
        f"StandardError=append:{_specifier(str(spec.output))}\n"
        "Restart=on-failure\n"
        "RestartSec=2\n"
        "TimeoutStopSec=20\n"
        "UMask=0077\n"
        "NoNewPrivileges=true\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def launchd_plist(spec: ServiceSpec) -> str:
    """Return a launch agent (launchd.plist(5))."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(spec.command),
        "EnvironmentVariables": dict(spec.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 20,
        "Umask": 0o077,
        "StandardOutPath": str(spec.output),
        "StandardErrorPath": str(spec.output),
    }
    return plistlib.dumps(agent).decode()


def windows_task(spec: ServiceSpec) -> str:
    """Return a task in the Task Scheduler's XML, version 1.2. A shell sets the environment, because a task cannot."""
    settings = "".join(f'set "{name}={value}" && ' for name, value in sorted(spec.environment.items()))
    line = f"{settings}{subprocess.list2cmdline(spec.command)} >> {subprocess.list2cmdline([str(spec.output)])} 2>&1"
    task = ElementTree.Element("Task", {"version": "1.2", "xmlns": _TASKS})
    _add(task, "RegistrationInfo", Description=DESCRIPTION)
    _add(_add(task, "Triggers"), "LogonTrigger", Enabled="true")
    _add(
        _add(task, "Principals"), "Principal", {"id": "Author"}, LogonType="InteractiveToken", RunLevel="LeastPrivilege"
    )
    limits = _add(task, "Settings", ExecutionTimeLimit="PT0S", MultipleInstancesPolicy="IgnoreNew")
    _add(limits, "RestartOnFailure", Interval="PT1M", Count="3")
    _add(_add(task, "Actions", {"Context": "Author"}), "Exec", Command="cmd.exe", Arguments=f'/d /s /c "{line}"')
    return ElementTree.tostring(task, encoding="unicode", xml_declaration=False)


def _add(
    parent: ElementTree.Element, name: str, attributes: dict[str, str] | None = None, **texts: str
) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, name, attributes or {})
    for child, text in texts.items():
        ElementTree.SubElement(element, child).text = text
    return element


def _quoted(text: str) -> str:
    escaped = _specifier(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _specifier(text: str) -> str:
    return text.replace("%", "%%")
