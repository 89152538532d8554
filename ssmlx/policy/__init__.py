"""Decisions on what to draft: learned costs and acceptance, and the controller that weighs them."""
