"""_containers."""
