"""Prism: serve many LLMs on few GPUs by sharing their memory."""

__version__ = "0.1.0"
