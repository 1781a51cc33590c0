"""Modules that combine a base model, its TempNets and its loss; their forward returns the loss."""
