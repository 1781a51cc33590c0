"""What the tasks that learn from prepared text have in common: fields of their data sections, and preparing the text."""
