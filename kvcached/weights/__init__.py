"""Weights of models: a store that all processes of a machine share, and arenas on a device."""
