"""What a run would take, on paper: FLOPs, memory, seconds of a step, milliseconds of a token."""
