"""What the command prints: many arrays as one table, and the matrix of dtypes as a picture."""
