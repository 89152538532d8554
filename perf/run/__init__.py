"""What every measurement shares."""
