"""Capsules and producers that the kit controls, for its checks."""
