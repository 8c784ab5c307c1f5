"""Ways in which models share a device: step control, turns and pools of KV blocks."""
