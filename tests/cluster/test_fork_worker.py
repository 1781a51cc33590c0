"""Test the workers of the tests' own Ray: they are forks, and differ from each other as processes do."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import ray

from jobs.engine.cluster import start_ray

pytestmark = pytest.mark.cluster


@ray.remote
class Witness:
    """Look at the process of a worker."""

    def look(self) -> dict[str, Any]:
        """Return what tells this process from others, and what Ray has made of it."""
        import random

        import numpy as np

        return {
            "process": os.getpid(),
            "group": os.getpgrp(),
            "has torch": "torch" in sys.modules,
            "job": ray.get_runtime_context().get_job_id(),
            "variable": os.environ.get("TEST_OF_FORKS"),
            "of Ray": ray.ObjectRef.from_random().hex(),
            "of Python": random.random(),
            "of NumPy": np.random.random(),  # noqa: NPY002 - the state that all of a process shares is meant
        }


def test_forks_differ_as_processes_do(cluster: dict[str, str]) -> None:
    witnesses = [Witness.options(num_cpus=0).remote() for _ in range(3)]
    seen = ray.get([witness.look.remote() for witness in witnesses])
    assert all(worker["has torch"] for worker in seen)  # without importing it
    assert all(worker["group"] == worker["process"] for worker in seen)
    for name in ("process", "of Ray", "of Python", "of NumPy"):
        assert len({worker[name] for worker in seen}) == len(seen), name


def test_a_fork_has_the_environment_of_its_actor(cluster: dict[str, str]) -> None:
    variables = {"env_vars": {"TEST_OF_FORKS": "here"}}
    with_variable = Witness.options(num_cpus=0, runtime_env=variables).remote()
    without = Witness.options(num_cpus=0).remote()
    seen, other = ray.get([with_variable.look.remote(), without.look.remote()])
    assert seen["has torch"]
    assert seen["variable"] == "here"
    assert other["variable"] is None


def test_a_fork_belongs_to_the_job_that_asks_for_it(cluster: dict[str, str]) -> None:
    jobs = set()
    for _ in range(2):
        ray.shutdown()
        start_ray()
        jobs.add(job := ray.get_runtime_context().get_job_id())
        seen = ray.get(Witness.options(num_cpus=0).remote().look.remote())
        assert seen["has torch"]
        assert seen["job"] == job
    assert len(jobs) == 2


@pytest.mark.parametrize(
    "environment", [{"py_executable": f"{sys.executable} -u"}, {"env_vars": {"PYTHONPATH": "elsewhere"}}]
)
def test_a_worker_that_needs_another_python_is_a_new_process(
    cluster: dict[str, str], environment: dict[str, Any]
) -> None:
    witness = Witness.options(num_cpus=0, runtime_env=environment).remote()
    assert not ray.get(witness.look.remote())["has torch"]
