"""The task of training language models and their TempNets."""
