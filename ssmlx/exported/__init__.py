"""Models that `python -m ssmlx.export` wrote, run by Core ML or Core AI.

    from ssmlx import exported

    model = exported.load("exported/sql")
    for response in exported.stream_generate(model, exported.prompt_tokens(model, "...")):
        print(response.text, end="", flush=True)

Greedy. The host keeps the draft tree and the slots of the cache, see `decode.py`; what it does is
small enough to be written in an app's own language, as `examples/swift` does.

| file | what it has |
|---|---|
| `api.py` | `load`, `generate`, `stream_generate`: text in, text out |
| `decode.py` | the loop, and which slot of the cache holds which token |
| `backends.py` | Core ML and Core AI behind one interface |
| `manifest.py` | what a package says of itself |
| `__main__.py` | `python -m ssmlx.exported` |
"""

from .api import ExportedModel, generate, load, prompt_tokens, stream_generate
from .backends import Backend
from .decode import SlotCache
from .manifest import Manifest

__all__ = [
    "Backend", "ExportedModel", "Manifest", "SlotCache",
    "generate", "load", "prompt_tokens", "stream_generate",
]  # fmt: skip
