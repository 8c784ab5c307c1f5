"""Adapters: engines whose KV cache is stored in kvcached (docs/kvcached-adapters.md).

The library does not import them and works without them. Each adapter imports its engine.
"""
