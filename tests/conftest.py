"""Settings that must be made before any test module imports Ray: it reads them once."""

from __future__ import annotations

import os

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
