"""What to draft: costs and acceptance that are learned, and the controller that weighs them."""
