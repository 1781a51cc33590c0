"""The command `ray`, for a node whose workers are forked (`fork_worker.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from ray._private import ray_constants
from ray.scripts.scripts import main

from jobs.engine.cluster import CPU_ENVIRONMENT

if __name__ == "__main__":
    # The C library reads these when a process starts, so that a fork cannot set them for itself.
    os.environ.update(CPU_ENVIRONMENT)
    # Ray joins this with the directory of its own scripts, which an absolute path replaces.
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("fork_worker.py"))
    main()
