"""Structs of the YAML's sections and of the resolved configuration."""
