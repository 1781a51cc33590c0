"""Text data: archives are read as documents, which are stored whole or packed into blocks of tokens."""
