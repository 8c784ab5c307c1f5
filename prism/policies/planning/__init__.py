"""Parts of a plan: migrations for balance, drains, copies of models, searched placements."""
