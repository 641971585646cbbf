"""The result of converting every dtype and every odd source to every target: measured, compared, drawn."""
