"""Life of models and engine processes on the device, and their memory."""
