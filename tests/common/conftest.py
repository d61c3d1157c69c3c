from __future__ import annotations

from hypothesis import settings

# The machine's speed is not what these tests are about.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
