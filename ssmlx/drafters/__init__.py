"""What proposes the next tree: one drafter a file, none with a loop of its own.

| drafter | file | trained | reads the text |
|---|---|---|---|
| the model's own streams | `stream_drafter.py` | yes | on the device |
| prompt lookup | `lookup.py` | no | yes |
| lookahead decoding | `lookahead.py` | no | yes |
| a separate model | `draft_model.py` | elsewhere | yes |
| a head for multi-token prediction | `mtp.py`, `mtp_head.py` | elsewhere | yes |
| an assistant of Gemma 4 | `gemma_assistant.py`, `gemma_assistant_model.py` | elsewhere | yes |
| Medusa heads | `medusa.py` | yes | no |
| an MLP speculator | `mlp_speculator.py` | yes | no |

Each is registered in its file, by `registry.py`; assistants where MTP heads are. A drafter's name
and settings, as `--drafter` and `drafter=` take them, are parsed by `option.py`. `unaccepted.py`
says when such a draft is never accepted. Heads of every kind share `head_drafter.py`, and a
folder format, `heads.py`, where they are registered. Texts are looked up in with `text_index.py`,
and trees put together on the host with `trie.py`; `text_caches.py` has caches of texts that
outlive answers; `copies.py` mixes what stood in the text into the
streams' guesses.
`ssmlx.decoding.drafter` says what the loop expects of them.
"""
