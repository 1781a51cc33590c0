"""Verifiers, which give a generated text a reward in [0, 1]: built-in ones, a Python function, or a command."""
