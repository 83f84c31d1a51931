"""Files that others wrote, read without trusting them, and files of ours, written atomically."""
