"""The headroom test as a job: what temperatures could gain on held-out data, measured before anything is trained.

The flow is the same for all data (`job.py`): measure predictions in a pool of workers, test, report. What a prediction is,
and how it is measured, is a matter of the data: the next token of a text (`texts.py`), or the caption of an image and the
image of a caption (`pairs.py`).
"""
