"""Weights of models: loads over the node's links, and the machine's store."""
