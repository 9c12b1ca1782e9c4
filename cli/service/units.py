"""A background service, as systemd, launchd and Windows' Task Scheduler want it written."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ...protocol.errors import ConfigurationError

LABEL = "updraft"
DESCRIPTION = "Updraft: an OpenAI port on this machine"
_TASKS = "http://schemas.microsoft.com/windows/2004/02/mit/task"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The service that runs in the background."""

    # Program and arguments; the program's path is absolute. No secret is in them.
    command: tuple[str, ...]
    # Variables that it needs beyond the user's own.
    environment: Mapping[str, str]
    # What it prints where its own log does not reach.
    output: Path

    def __post_init__(self) -> None:
        for text in (*self.command, *self.environment.values(), str(self.output)):
            if any(character in text for character in "\n\r\0"):
                raise ConfigurationError(f"A line break cannot stand in a service's command: {text[:80]!r}.")


def systemd_unit(spec: ServiceSpec) -> str:
    """A user unit (systemd.service(5)): restarted after a failure, and ended by SIGTERM, which drains."""
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
    """A launch agent (launchd.plist(5))."""
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
    """A task of the Task Scheduler, version 1.2. A task has no variables: a shell sets them."""
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
