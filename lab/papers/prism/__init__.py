"""Studies of Prism's evaluation."""
