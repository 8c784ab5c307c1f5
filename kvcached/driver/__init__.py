"""Memory of a GPU as its driver counts it."""
