"""What a word on the command line stands for: files and objects in memory."""
