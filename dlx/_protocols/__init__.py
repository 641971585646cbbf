"""_protocols."""
