"""Processes of engines: fork servers, forked and fresh engines, and tensor-parallel ranks."""
