"""What the command prints: tables, text, JSON, SVG."""
