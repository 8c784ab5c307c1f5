"""Images in conversations: their data, and their preparation for the model."""
