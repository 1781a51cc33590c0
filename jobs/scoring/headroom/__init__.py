"""The headroom test as a job: what temperatures could gain on held-out data, measured before anything is trained."""
