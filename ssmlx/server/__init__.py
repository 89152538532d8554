"""A server for editors, agents and chat pages; needs the extra `server`."""
