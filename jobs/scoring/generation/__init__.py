"""The modules behind `jobs.generate`: configuration, prompt formats, sampling and records."""
