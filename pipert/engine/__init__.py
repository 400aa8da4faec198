"""Posts runs, waits for them, and gives them up."""
