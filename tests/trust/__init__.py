"""What peers have done, in a form that others can check."""
