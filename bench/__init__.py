"""Every benchmark, one program a file; their tables and pictures are in bench/results/."""
