"""The arguments of a sweep of tiny language models."""

TINY = [
    "--base.run.name=rho", "--base.run.num-steps=10", "--base.run.max-restarts=0", "--base.data.train=DIR/train",
    "--base.data.validation=DIR/validation", "--base.data.tokenizer=DIR/tokenizer", "--base.data.context-length=64",
    "--base.model.hidden-size=64", "--base.model.num-layers=2", "--base.model.num-heads=4", "--base.workers.num-workers=1",
    "--base.workers.zero-stage=0", "--base.workers.num-threads=1", "--base.validation.num-oracle-tokens=512",
    "--base.validation.every=2", "--base.temperature.hidden-size=32", "--base.temperature.num-prototypes=16",
    "--base.temperature.rho=1", "--base.optimizer.batch-size=8", "--base.run.checkpoint-every=100",
    # In so few steps the mean temperature stays near its initial value. The last learning rate is far too high.
    "--sweep.axes", "temperature.rho=0.5,2.5", "optimizer.learning-rate-base=1e-3,3e-3,0.5", "--sweep.band", "0.6", "1.6",
]  # fmt: skip
