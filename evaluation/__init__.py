"""Zero-shot evaluation: tasks, shared-prefix scoring, figures, the table."""
