"""Objects that dlx refuses, and the advice that its errors give."""
