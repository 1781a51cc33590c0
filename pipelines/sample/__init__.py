"""The sample data that the project makes itself: prose that is installed anyway, and rendered scenes with captions."""
