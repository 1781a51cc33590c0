"""Try a model and its TempNet in a browser: type a prompt, and see every token coloured by its τ while it is generated.

For example:

    python -m jobs.playground --model runs/gpt2-scratch-small/export
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from jobs.scoring.generation.config import PlaygroundConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job until Ctrl-C; returns the exit status."""
    config = parse_options(PlaygroundConfig, arguments, job="playground", description=__doc__)
    from jobs.scoring.playground.server import HOST, Playground, make_server

    with ending_in_one_line():
        server = make_server(config, Playground(config))
    print(f"http://{HOST}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()
    return 0


if __name__ == "__main__":
    run_job(main)
