"""The headroom test as a job: what a temperature per token could gain on a text, measured before anything is trained."""
