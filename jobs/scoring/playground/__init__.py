"""The modules behind `jobs.playground`: generation step by step, and the page that shows it."""
