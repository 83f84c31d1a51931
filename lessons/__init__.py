"""The workshop: nine lessons with exercises that check themselves, and longer demonstrations."""
