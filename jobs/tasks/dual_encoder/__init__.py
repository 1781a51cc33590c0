"""The task of training dual encoders (image and text) with contrastive losses, and their temperatures."""
