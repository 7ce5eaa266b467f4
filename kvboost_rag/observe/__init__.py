"""What happened, counted and timed; work that waits until nobody else does."""
