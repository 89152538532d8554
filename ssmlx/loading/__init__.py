"""From names and folders to weights on a model.

| file | what it has |
|---|---|
| `load.py` | `load`: a model's name to model and tokenizer, adapter included |
| `tokenizer_files.py` | a tokenizer read by its own files alone, and its chat template's file |
| `generation_config.py` | how a model's generation_config.json asks for its tokens to be sampled |
| `names.py` | what a user may call a model or an adapter, to its folder |
| `folders.py` | names of the files in these folders, what one lacks, where they are kept |
| `hub.py` | models and adapters of the Hub, found in its cache or downloaded |
| `wheel.py` | the alias's model, fetched out of a wheel and made into a folder |
| `gguf.py` | that model's GGUF file to a folder in mlx-lm's layout |
| `adapter.py` | an adapter's folder: its format, read and written; values, no model |
| `lora_files.py` | LoRA and DoRA in mlx-lm's and PEFT's files |
| `module_patterns.py` | PEFT's regular expressions of modules, matched in bounded time |
| `attach.py` | an adapter on a loaded base, off it, exchanged; what "auto" means |
| `loaded_adapters.py` | an engine's adapters, each loaded once on the one base |
| `adapt_runs.py` | adapters that were made on this machine, by the weights they are for |
| `known_heads.py` | heads that were trained to draft for published models: a table |
| `model_heads.py` | which of them are a loaded model's, and which are on this machine |
| `head_tensors.py` | names of heads' tensors among a model's own, and a model without these |
| `stored_tensors.py` | which files hold a folder's tensors, and where in them, by headers alone |
| `stored_types.py` | refuses weights in types that mlx-lm does not read as the numbers they are |
| `identity.py` | which models are the same: in stored bytes, as a base, in keys and values |
| `tensors.py` | safetensors files read, checked and written strictly |
| `files.py` | files and folders written whole or not at all, and locked |
"""
