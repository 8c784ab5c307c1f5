"""Commands for developers.

This is a regular package, because an installed package of this name would hide a namespace package.
"""
