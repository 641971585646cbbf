"""The built-in adapters of dlx: one module for each framework, in the shape that third parties use."""
