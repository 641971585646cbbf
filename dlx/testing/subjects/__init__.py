"""The libraries that the kit can grade by name."""
