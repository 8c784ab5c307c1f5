"""Parts of all studies: environment, traces, points, tuning, lines and findings."""
