"""Contrastive losses with personalised temperatures, exact on any number of ranks."""
