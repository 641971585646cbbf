"""The libraries that the kit grades by name, described as data."""
