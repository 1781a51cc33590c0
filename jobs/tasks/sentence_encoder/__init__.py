"""The task of training sentence encoders on spans of documents (DeCLUTR)."""
