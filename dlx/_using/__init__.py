"""_using."""
