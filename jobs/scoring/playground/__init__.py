"""The modules behind `jobs.playground`: configuration, generation step by step, and the page that shows it."""
