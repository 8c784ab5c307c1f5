"""Variants of policies for ablations, and the baselines that only papers have."""
