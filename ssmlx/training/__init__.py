"""Training: what the trainers in PyTorch (`convert/`) and in MLX share, the one in MLX, and
`adapt`.
"""
