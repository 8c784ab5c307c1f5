"""Studies of MuxServe's evaluation."""
