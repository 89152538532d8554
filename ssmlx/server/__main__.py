"""`python -m ssmlx.server`: one model for editors, agents and chat pages."""

import argparse
import asyncio
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands import options
from ..commands.check import head_start
from ..commands.drafting import drafting_lines
from ..errors import InputError, missing_package_error, require
from ..json_files import read_text
from ..loading.names import AUTO_ADAPTER, NO_ADAPTER

PROG = "ssmlx.server"
EPILOG = """examples:
  python -m ssmlx.server --model org/name --adapter runs/mine --port 9000
  python -m ssmlx.server --api-keys keys.txt --host 192.168.1.5 --prompt-cache ~/.cache/prompts

OpenAI's and Anthropic's APIs are below /v1, a chat page is at /. A request names the model, or
MODEL:ADAPTER for one with an adapter; the settings here hold where it says nothing. MODEL drafts as
a chat does; with --adapter none, it is the base alone."""
BODY = '{"messages": [{"role": "user", "content": "Name three primary colours."}]}'


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = options.make_parser(PROG, "Serve a model that drafts for itself.", EPILOG, "[options]")
    group = parser.add_argument_group("server")
    options.add_options(
        group,
        (
            "--host",
            "ADDRESS",
            "address to listen at (default: %(default)s, this machine alone)",
            "127.0.0.1",
        ),
        ("--port", "N", "port, 0 for any that is free (default: %(default)s)", 8080),
        ("--allow-host", "NAME", "another name that it may be called by; repeatable", list),
        (
            "--api-keys",
            "FILE",
            "keys that requests need, one a line, in a file that only you can "
            "read; each has its own prompt cache",
            Path,
        ),
        (
            "--any-model",
            "",
            "the first model answers where a request names one that is not here",
            bool,
        ),
        ("--prompt-cache", "FOLDER", "keep processed prompts on disk, too", Path),
        (
            "--memory",
            "GIB",
            "memory that texts may take beside the weights, those of running answers and of kept "
            "prompts; prompts go first (default: two thirds of what the weights leave)",
            float,
        ),
        ("--max-open", "N", "answers at once; more wait (default: %(default)s)", 8),
        ("--max-waiting", "N", "requests that may wait (default: %(default)s)", 64),
        ("--timeout", "S", "seconds that a request may take (default: %(default)s)", 600.0),
    )
    options.add_model_options(parser, list)
    options.add_decoding_options(parser, max_tokens=16384)
    return parser.parse_args(argv)


def read_keys(path: Path | None) -> list[bytes]:
    """The keys of a file that its owner alone can read; none without one."""
    if path is None:
        return []
    expected = "keys, one a line, in a file that only you can read"
    keys = read_text(path, expected=expected, do="check --api-keys").split()
    require(bool(keys), f"{path} holds no keys", expected=expected, do="write some")
    is_own = os.name != "posix" or path.stat().st_mode & 0o077 == 0
    require(is_own, f"others can read {path}", expected=expected, do=f"chmod 600 {path}")
    return [key.encode() for key in dict.fromkeys(keys)]


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        found = f"nothing can listen at {host}, port {port} ({error})"
        expected = "an address of this machine, and a free port"
        do = "choose another"
        raise InputError(found, expected=expected, do=do) from error


def prompt_caches(folder: Path | None, keys: Sequence[bytes]) -> list[Any]:
    """A prompt cache for each key, in folders named by their hashes; one for all without keys."""
    from ..prompt_cache import PromptCache

    names = [hashlib.sha256(key).hexdigest()[:16] for key in keys] or [""]
    folders = [None if folder is None else folder / name for name in names]
    return [PromptCache(None, one, 2**32 // len(names)) for one in folders]


def models_of(name: str, adapters: Sequence[str]) -> dict[str, str | None]:
    """Adapters, by what the model with each is called; None for the one that a chat takes.

    "auto" and "none" among them say what the model has under its own name.
    """
    own = [one for one in adapters if one in (AUTO_ADAPTER, NO_ADAPTER)]
    found = f"--adapter {' and --adapter '.join(own)}"
    require(len(own) < 2, found, expected="one of them", do="drop the other")
    models: dict[str, str | None] = {name: NO_ADAPTER if own == [NO_ADAPTER] else None}
    for one in (one for one in adapters if one not in own):
        key = f"{name}:{Path(one).resolve().name if Path(one).exists() else one}"
        found = f"two adapters are called {key}"
        do = "rename one, or give its run's folder"
        require(key not in models, found, expected="a name for each", do=do)
        models[key] = one
    return models


def _main(args: argparse.Namespace) -> None:
    config = options.generate_config(args)
    keys = read_keys(args.api_keys)
    drafter: options.DrafterOption = args.drafter
    try:
        import uvicorn

        from .app import LOCAL, make_app
    except ImportError as error:
        raise missing_package_error("the server", error, "server") from error
    from ..answers import run
    from ..engine import Engine
    from ..generation.plan import make_plan
    from ..model import metal
    from .answering import Answering, Limits

    limits = Limits(open=args.max_open, waiting=args.max_waiting, time=args.timeout)
    sock = listening(args.host, args.port)
    metal.use(drafter.attention)
    caches = prompt_caches(args.prompt_cache, keys)
    loading: Any = {"dtype": args.dtype, "progress": options.DownloadBar()}
    engine = Engine(
        args.model,
        prompt_cache=caches[0],
        memory_gb=args.memory,
        draft_head=drafter.draft_head,
        **loading,
    )
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    models = models_of(name, args.adapter or ())
    loaded = options.load_drafter(args, engine.model(models[name]), engine.tokenizer)
    for one in models.values():
        head_start(engine.model(one), engine.tokenizer, config, loaded)  # refuses what does not fit
    answering = Answering(
        engine, models, caches, loaded, args.template_args or {}, limits, args.any_model
    )
    hosts = [one.lower() for one in (*LOCAL, args.host, *(args.allow_host or ()))]
    app = make_app(answering, config, hosts, keys)
    model = engine.model(models[name])
    plan = run(lambda: make_plan(model, config, drafter=loaded))
    _greet(sock, [*models], bool(keys))
    lines = drafting_lines(model, plan, models[name] or engine.default_adapter)
    print(*lines, sep="\n", flush=True)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            """Answers end before their requests are waited for."""
            await asyncio.to_thread(answering.close)
            await super().shutdown(sockets)

    own: Any = {"ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 3}
    settings = uvicorn.Config(app, http="h11", log_level="warning", **own)
    Server(settings).run(sockets=[sock])


def _greet(sock: socket.socket, models: Sequence[str], needs_key: bool) -> None:
    host, port = sock.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    headers = "-H 'Content-Type: application/json'"
    if needs_key:
        headers += ' -H "Authorization: Bearer $KEY"'
    elif host != "::1" and not host.startswith("127."):
        print("whoever reaches this address may ask: see --api-keys")
    print(f"{address} has {', '.join(models)}; a chat page is at {address}/\n")
    print(f"curl {address}/v1/chat/completions {headers} -d '{BODY}'\n", flush=True)


main = options.command(PROG, parse_args, _main)

if __name__ == "__main__":
    raise SystemExit(main())
