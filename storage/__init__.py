"""Atomic writes, and files that are checked before they are used."""
