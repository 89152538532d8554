"""Export of the stream-fused model as an asset: `python -m ssmlx.export`.

One PyTorch graph of fixed shapes, made of the reference's own layers and weights, in two functions:
"prefill" puts a chunk of the prompt into the cache, "decode" verifies a tree and drafts for the
next. Both Core ML and Core AI take it. Shapes, beside the legend of `ssmlx.model.shapes`:

    S   slots of the cache: a committed token's keys and values are in any one of them, the same
        in every layer. The host knows which (`ssmlx.exported.decode`); nothing is ever moved.
    T   tokens of a prompt chunk
    R   rows of a call: N nodes or T tokens; M * (1 + G) in the upper layers of "decode"
    H   query heads          Vd  tokens that streams draft from

What the host gives and gets is in `graph.py`; README.md here says why each profile is as it is.
"""
