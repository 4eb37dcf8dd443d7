"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline: a slow machine is not a wrong program. The blob makes a failure of another machine's repeatable here.
settings.register_profile("rankd", deadline=None, print_blob=True)
settings.load_profile("rankd")
