"""Requirements for `make test-floors`: each direct dependency at the lowest version that pyproject.toml allows.

    python tests/support/lowest_versions.py          # `fastapi==0.115`, one a line
    python tests/support/lowest_versions.py --newest # `fastapi>=0.115`, for the newest versions instead

torch is left out: its builds are large. llama-cpp-python is left out too: `local_engine/llama/build.py` installs it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("edge", "postgres", "redis", "otel")
# Packages of other extras that the tests of `make test-floors` import, by extra.
ALSO = {
    "train": ("onnx", "scikit-learn"),
    "cloud": ("gguf", "safetensors"),
    "dev": (
        *("anthropic", "cryptography", "hypothesis", "jsonschema", "ollama"),
        *("pytest", "pytest-timeout", "schemathesis", "setuptools"),
    ),
}
_LEFT_OUT = ("torch", "llama-cpp-python")


def requirements(*, newest: bool = False) -> list[str]:
    """Return the direct dependencies to install for `make test-floors`, one requirement per package."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted_packages = [*project["dependencies"], *(package for name in EXTRAS for package in extras[name])]
    wanted_packages += [package for name, names in ALSO.items() for package in extras[name] if _name(package) in names]
    chosen = sorted({package for package in wanted_packages if _name(package) not in _LEFT_OUT})
    return chosen if newest else [package.replace(">=", "==") for package in chosen]


def _name(requirement: str) -> str:
    return re.split(r"[\[=<>;]", requirement)[0].strip()


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(newest="--newest" in sys.argv[1:])) + "\n")
