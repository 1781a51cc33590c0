"""Images and captions: an index of every archive, views, tokens, pairs."""
