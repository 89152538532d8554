"""Drafters, which propose the next tree: one a file, none with a loop of its own.

`ssmlx.settings.DRAFTERS` lists them; `ssmlx.decoding.drafter` says what the loop expects.
"""
