"""When to draw, and how finely."""
