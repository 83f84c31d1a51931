"""Before a program begins its work: its settings are read, and processes become ranks."""
