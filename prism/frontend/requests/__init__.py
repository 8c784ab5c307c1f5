"""One HTTP request from its checked body to its answer: specification, generation, and reply."""
