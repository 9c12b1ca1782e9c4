"""What all tests share: property tests are judged by their results, not by the load of the machine they run on."""

from hypothesis import HealthCheck, settings

settings.register_profile("updraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("updraft")
