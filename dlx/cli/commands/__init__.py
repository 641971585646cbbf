"""The subcommands: a module for each, with `run(arguments, screen)`."""
