"""_views."""
