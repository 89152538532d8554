"""The model: mlx-lm's layers on the rows of a draft tree, with streams beside them.

`metal/` has the fused attention kernel for Apple GPUs; `README.md` lists the families.

| file | what it has |
|---|---|
| `shapes.py` | the legend of shapes, their checks, reads by the host |
| `tree.py` | draft trees: topologies, and trees grown from scores |
| `streams.py` | `StreamFusedModel`: lower, insert, upper, second pass (figures 2 and 7) |
| `condition.py` | what a drafted token tells a stream of the one behind it |
| `masks.py` | which row of a step sees which |
| `text_cache.py` | `TextCache`: what is kept of a text, as all who decode see it |
| `cache.py` | `TreeCache`: committed tokens, and accepted paths that are not counted yet |
| `state_cache.py` | `StateCache`: mlx-lm's caches, and the way back from drafted tokens |
| `recurrent.py` | recurrent layers: their states behind any row of a call |
| `final_norm.py` | what enters the final norm of a model that is called as a whole |
| `layer_state.py` | what one layer keeps of a text |
| `rope.py` | rotary settings, how far a model reaches, embeddings at a position for each row |
| `latent.py` | latent attention, of several rows as of one |
| `backbone.py` | `Backbone`: the base model, its stages or its own call alone |
| `stages.py` | embedding, layers, norm and head, run one by one |
| `family.py` | where a class of mlx-lm has these parts |
| `capabilities.py` | what a model can do beside plain decoding, and why not |
| `capability_checks.py` | tries it, by a few tokens run both ways |
| `lm_head.py` | the LM head of all tokens, or of some |
| `lora.py` | LoRA and DoRA on layers, merged or beside the weights |
| `modules.py` | copies of modules that share their arrays; modules whose inputs are noted |
| `ranks.py` | a model over several machines |
| `opt.py` | OPT, which mlx-lm lacks |
"""
