"""Path of a request: queue, admission, serving."""
