"""The subcommands: one module each, with `run(arguments, screen)`."""
