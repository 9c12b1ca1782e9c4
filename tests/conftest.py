"""Settings of all tests: no deadline depends on the load of the machine, and no test sees the user's files."""

import atexit
import gc
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from httpx._types import CertTypes
from hypothesis import HealthCheck, settings

# Tests start a thousand interpreters, of which each would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Workers share the processors: a second OpenMP thread in each costs a third of the time. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that a program asks for sleep when idle

NATIVE = Path(__file__).parents[1] / "out" / "native"

settings.register_profile(
    "updraft", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
# pytest --hypothesis-profile thorough
settings.register_profile("thorough", settings.get_profile("updraft"), max_examples=1000)
settings.load_profile("updraft")

# httpx gives up after five seconds where a call names no timeout: too few on a busy machine.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, 60.0)

_new_context, _contexts = httpx.create_ssl_context, dict[tuple[object, ...], ssl.SSLContext]()


def _shared_context(
    verify: ssl.SSLContext | str | bool = True, cert: CertTypes | None = None, trust_env: bool = True
) -> ssl.SSLContext:
    """Return one context for all clients with the usual certificates, which take 30 ms to read for each client."""
    if verify is not True or cert is not None:
        return _new_context(verify, cert, trust_env)
    key = (trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if key not in _contexts:
        _contexts[key] = _new_context(trust_env=trust_env)
    return _contexts[key]


pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", _shared_context)


def pytest_configure(config: pytest.Config) -> None:
    """Give all workers a new `UPDRAFT_HOME`, and restore SIGINT, which a shell's background jobs ignore.

    Native code takes seconds to build, so that it is kept in `out/native` and built before the workers start.
    """
    if not hasattr(config, "workerinput"):
        home = tempfile.TemporaryDirectory(prefix="updraft-tests-")
        os.environ["UPDRAFT_HOME"] = home.name
        config.add_cleanup(home.cleanup)
        NATIVE.mkdir(parents=True, exist_ok=True, mode=0o700)
        (Path(home.name) / NATIVE.name).symlink_to(NATIVE)
        if config.getoption("numprocesses", None):
            subprocess.run([sys.executable, "-m", "updraft.kernels.runtime.native_library"], check=False)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Stop garbage collection for the imports of all tests: nothing of a module is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the tests and their modules from garbage collection, which would read millions of objects each time."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports objects that outlive the interpreter as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first: no worker is left with one at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
