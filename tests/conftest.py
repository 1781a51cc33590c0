"""Settings of all tests; Ray's must be made before any test module imports it: it reads them once."""

from __future__ import annotations

import os

from hypothesis import settings

# No test is one of speed: a busy machine may be slow at any of them.
settings.register_profile("tempnet", deadline=None)
settings.load_profile("tempnet")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
