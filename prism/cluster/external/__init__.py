"""External servers: whether they answer, and their shares of memory."""
