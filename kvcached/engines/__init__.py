"""Adapters: engines whose KV cache lies in kvcached (docs/kvcached-adapters.md).

The library imports none of them, and none of them is needed to use it. Each imports its engine.
"""
