"""Installs the programs that tests start, if the user is root on Debian. Otherwise the tests are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Debian package that provides a program, by the possible names of the program.
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
    """Return the Debian packages to install."""
    return [
        package for names, package in PACKAGES.items() if not any(shutil.which(name, path=path()) for name in names)
    ]


def main() -> int:
    packages = missing()
    if not packages:
        return 0
    install = ["apt-get", "install", "-qq", "--no-install-recommends", "-y", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.stderr.write(f"Tests will be skipped, because programs are missing. As root, run: {' '.join(install)}\n")
        return 0
    for command in (["apt-get", "update", "-qq"], install):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode:
            sys.stderr.write(f"Tests will be skipped, because programs are missing: {' '.join(command)} failed.\n")
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
