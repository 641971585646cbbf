"""Adapters and plugins for tests."""
