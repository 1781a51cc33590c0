"""Seeds of what is random in a step."""

from __future__ import annotations

import hashlib


def seed_of(*values: int) -> int:
    """Return a 64-bit seed computed from the values, which may be of any size."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")
