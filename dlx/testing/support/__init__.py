"""Capsules and producers that the checks control to the last bit. No library is trusted or imported here."""
