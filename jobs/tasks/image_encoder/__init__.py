"""The task of training image encoders on pairs of views (SimCLR)."""
