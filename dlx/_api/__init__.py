"""The public functions of dlx."""
