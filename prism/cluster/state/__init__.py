"""State of the scheduler's process: reports of agents, sizes, actions, time limits."""
