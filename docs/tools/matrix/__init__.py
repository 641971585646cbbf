"""What becomes of every dtype and every odd source, towards every target: measured, compared, drawn."""
