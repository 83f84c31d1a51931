"""What keeps a run alive and on record, from its first line to its plots."""
