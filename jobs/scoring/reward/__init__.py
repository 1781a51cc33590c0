"""The modules behind `jobs.train_reward`: a TempNet learns from the rewards of what it generates, its base frozen."""
