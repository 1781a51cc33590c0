"""The token without which a Ray on this machine runs no code: made once for a user, whichever of their jobs is first."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path


def ensure_token() -> None:
    """Make the user's token for Ray, `~/.ray/auth_token`, if there is none, and close it to others.

    Ray makes one, too, but not safely: if two jobs start for the first time on a machine, the later one replaces the
    token of the other. Every process reads the token when it starts, so that no new process of the first job's Ray
    would be let in, and the job would wait for its workers for ever.

    Nothing is made if the token comes from the environment, or if RAY_AUTH_MODE turns tokens off.

    Raises:
        OSError: if the file cannot be written.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="auth_token-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another job was faster: its token is whole, and it counts
                os.link(name, path)
        finally:
            os.unlink(name)
    if path.stat().st_uid == os.getuid():
        path.chmod(0o600)
