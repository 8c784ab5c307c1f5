"""Structured output in separate processes, and parsers of answers."""
