"""What reuse costs in accuracy, and what a log of prompts would gain."""
