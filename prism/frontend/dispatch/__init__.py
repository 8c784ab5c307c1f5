"""Open requests and the shared queue: log, batches, retries, refusals, and rates of keys."""
