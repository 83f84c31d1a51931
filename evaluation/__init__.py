"""Zero-shot evaluation: tasks, scores, figures, the table."""
