"""What proposes the next tree: one drafter a file, none with a loop of its own.

Each file registers its drafter (`registry.py`); `ssmlx.decoding.drafter` says what the loop
expects.
"""
