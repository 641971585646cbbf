"""The sources that a command reads: files and objects in memory."""
