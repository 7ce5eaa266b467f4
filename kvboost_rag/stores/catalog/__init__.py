"""What is known about chunks, in SQLite."""
