"""Models that `python -m ssmlx.export` wrote, run by Core ML or Core AI.


    from ssmlx import exported

    model = exported.load("exported/sql")
    for response in exported.stream_generate(model, exported.prompt_tokens(model, "...")):
        print(response.text, end="", flush=True)

Greedy. The host keeps the draft tree and the slots of the cache, see `decode.py`; what it does is
small enough to be written in an app's own language, as `examples/swift` does.
"""

from .api import ExportedModel, generate, load, prompt_tokens, stream_generate
from .backends import Backend
from .decode import SlotCache
from .manifest import Manifest

__all__ = [
    "Backend", "ExportedModel", "Manifest", "SlotCache",
    "generate", "load", "prompt_tokens", "stream_generate",
]  # fmt: skip
