"""Training sentence encoders on the spans of documents."""
