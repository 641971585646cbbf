"""Files in the formats that dlx reads."""
