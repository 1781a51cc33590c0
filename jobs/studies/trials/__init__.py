"""Running many training runs as the trials of one experiment."""
