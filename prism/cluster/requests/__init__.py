"""Requests that wait until they are bound to a device (`Policy.binds_requests`)."""
