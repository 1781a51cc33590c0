"""The predictions of a language model: settings, and measuring the tokens of a text."""
