"""What is fastest on this machine."""
