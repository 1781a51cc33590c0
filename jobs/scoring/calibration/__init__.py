"""The modules behind `jobs.calibrate`: configuration, and one module for each subcommand."""
