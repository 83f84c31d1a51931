"""How the ranks of a run find each other, and processes on one machine that are ranks."""
