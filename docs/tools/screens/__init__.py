"""Pictures of the command's screens, for the documentation."""
