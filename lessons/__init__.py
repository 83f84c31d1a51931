"""Lessons: programs that show one idea each."""
