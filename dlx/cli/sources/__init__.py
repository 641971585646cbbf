"""What a command reads: headers of files, and objects in memory."""
