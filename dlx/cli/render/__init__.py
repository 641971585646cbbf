"""What the command prints: tables, plain text and JSON on a screen, and pictures as SVG."""
