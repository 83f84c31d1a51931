"""Zero-shot evaluation: the tasks, how a choice is scored, and the table."""
