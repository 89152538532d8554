"""How the data of the examples and bundled adapters was made; run from the checkout."""
