"""The papers' tables and figures as experiments: the runs to make, the papers' figures, and the papers' claims."""
