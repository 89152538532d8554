"""The commands, and the options that they share."""
