"""What all tests share: property tests are judged by their results, not by the load of the machine they run on, and
products are ours in all of them that load llama.cpp, whichever imports it first."""

from hypothesis import HealthCheck, settings
from updraft.local_engine.llama.kernels import install

settings.register_profile("updraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("updraft")


def pytest_configure() -> None:
    install()
