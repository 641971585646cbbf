"""Tests with other Pythons, other versions of frameworks, and other libraries' tests."""
