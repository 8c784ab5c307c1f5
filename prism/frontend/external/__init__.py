"""Requests for external models, passed on to their servers."""
