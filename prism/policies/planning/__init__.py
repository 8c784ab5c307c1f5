"""Parts of a plan: moves for memory and compute, degrees, refusals, drains, copies, searched
placements."""
