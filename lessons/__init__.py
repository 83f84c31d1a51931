"""The workshop: programs that show one idea each."""
