"""Installs the programs that tests start, where the user can: as root on Debian. Their tests are skipped otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: By the names of a program: the Debian package with one of them.
PACKAGES = {
    ("chromium",): "chromium",
    ("redis-server", "valkey-server"): "redis-server",
    ("initdb",): "postgresql",
}


def path() -> str:
    """Return the search path of programs. Debian has a folder for each version of PostgreSQL."""
    folders = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])


def missing() -> list[str]:
    """The packages to install."""
    return [
        package for names, package in PACKAGES.items() if not any(shutil.which(name, path=path()) for name in names)
    ]


def main() -> int:
    packages = missing()
    if not packages:
        return 0
    install = ["apt-get", "install", "-qq", "--no-install-recommends", "-y", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.stderr.write(f"Tests are skipped for want of programs. As root: {' '.join(install)}\n")
        return 0
    for command in (["apt-get", "update", "-qq"], install):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode:
            sys.stderr.write(f"Tests are skipped for want of programs: {' '.join(command)} failed.\n")
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
