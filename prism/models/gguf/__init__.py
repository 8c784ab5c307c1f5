"""Models in GGUF: the folder of one, and its tensors."""
