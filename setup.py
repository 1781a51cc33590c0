"""Puts the jobs into the wheel, below `tempnet/_pipeline/`, where their names are in nobody's way.

In the checkout, `jobs/`, `pipelines/` and `infra/` lie at the top level. As top-level packages of a wheel they would take
the names `jobs` and `pipelines` in the environments of other people. `tempnet.command` puts the directory on the path.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_BESIDE = ("jobs", "pipelines", "infra", "requirements.lock")


class BuildWithJobs(build_py):
    """Copies what lies beside the library into a wheel; an editable install finds it in the checkout."""

    def run(self) -> None:
        """Build the library, and copy the rest."""
        super().run()
        if self.editable_mode:
            return
        for name in _BESIDE:
            source, target = Path(name), Path(self.build_lib, "tempnet", "_pipeline", name)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            elif source.is_file():
                shutil.copyfile(source, target)


setup(cmdclass={"build_py": BuildWithJobs})
