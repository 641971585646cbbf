"""Helpers that run code in other processes and threads."""
