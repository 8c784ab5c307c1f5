"""The user's YAML: read, checked and resolved to the configuration of every process."""
