"""The command `ray`, for a node whose workers are forked (`fork_worker.py`), and which does not watch itself.

What Ray does beside the work of a cluster took about an eighth of two cores while the tests ran: the log monitor reads all
logs ten times a second for drivers that show them, the agent measures the node's processes, and it and the dashboard look
through the files of events, of which every worker leaves one, every other second. No test needs any of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray._private import ray_constants
from ray.scripts.scripts import main

from jobs.engine.worker import CPU_ENVIRONMENT

if __name__ == "__main__":
    # The C library reads these when a process starts, so that a fork cannot set them for itself.
    os.environ.update(CPU_ENVIRONMENT)
    os.environ.update({"REPORTER_UPDATE_INTERVAL_MS": "60000", "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60"})
    # Ray joins this with the directory of its own scripts, which an absolute path replaces.
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("fork_worker.py"))
    sys.argv.append("--include-log-monitor=false")
    main()
