"""Training: recipes, the loop, its measurements and its report."""
