"""Sample data that the project generates itself: prose from installed packages, and rendered scenes with captions."""
