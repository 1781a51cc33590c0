"""Contrastive losses with a temperature for every sample, computed exactly on any number of ranks."""
