"""The model: mlx-lm's layers on the rows of a draft tree, with streams beside them.

`metal/` has the fused attention kernel for Apple GPUs; `README.md` lists the families.
"""
