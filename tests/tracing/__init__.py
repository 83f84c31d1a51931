"""What a step gives to its device, seen without one: operations, FLOPs, bytes alive."""
