"""What others publish, and what we read and write."""
