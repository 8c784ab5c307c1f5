"""Studies of SeaLLM's evaluation."""
