"""The parts of `jobs.generate`."""
