"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline and no check for slowness: a slow machine is not a wrong program. The blob makes a failure of another
# machine's repeatable here.
settings.register_profile("rankd", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# For `make quick`, which asks for it by --hypothesis-profile: fewer examples of each property.
settings.register_profile("quick", settings.get_profile("rankd"), max_examples=25)
settings.load_profile("rankd")
