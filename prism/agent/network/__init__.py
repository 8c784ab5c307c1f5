"""Sockets of the agent, and transfer of KV and weights between machines."""
