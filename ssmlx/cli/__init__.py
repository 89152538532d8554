"""The commands: chat, generate, and the options that they share."""
