"""The papers' tables and figures as experiments: what is run, what the paper has, and what it claims."""
