"""Many training runs as the trials of one experiment."""
