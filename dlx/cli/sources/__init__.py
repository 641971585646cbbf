"""What a command reads: headers of files, objects in memory, and arrays made to be tried."""
