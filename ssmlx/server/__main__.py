"""`python -m ssmlx.server`: one model for editors, agents and chat pages."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commands.answer_lines import answer_lines, with_model_sampling
from ..commands.callback_bars import DownloadBar
from ..commands.check import time_unknown_costs
from ..commands.decoding_options import (
    add_decoding_options,
    add_model_options,
    generate_config,
)
from ..commands.drafting import describe
from ..commands.load_target import load_drafter, require_drafter_key
from ..commands.parser import add_options, make_parser
from ..commands.running import make_main
from ..drafters.option import DrafterOption
from ..errors import InputError, missing_package_error, require
from ..json_files import read_text
from ..loading.names import AUTO_ADAPTER, NO_ADAPTER

if TYPE_CHECKING:
    from ..prompt_cache import PromptCache

PROG = "ssmlx.server"
EPILOG = """examples:
  python -m ssmlx.server --model org/name --adapter runs/mine --port 9000
  python -m ssmlx.server --api-keys keys.txt --host 192.168.1.5 --prompt-cache ~/.cache/prompts

OpenAI's and Anthropic's APIs are at /v1, a chat page is at /. A request names MODEL, which is used
as in ssmlx.chat, or MODEL:ADAPTER for one of the adapters of --adapter. With --adapter none, MODEL
is used without an adapter. Settings given here hold for requests that do not set them."""
_MOST_UNACCEPTED = 2048
"""Connections that the system keeps until they are accepted, if it does not keep fewer."""
BODY = '{"messages": [{"role": "user", "content": "Name three primary colours."}]}'


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Serve a language model over HTTP, sped up by speculative decoding.",
        EPILOG,
        "[options]",
    )
    group = parser.add_argument_group("server")
    add_options(
        group,
        (
            "--host",
            "ADDRESS",
            "address to listen on (default: %(default)s, reachable from this machine only)",
            "127.0.0.1",
        ),
        ("--port", "N", "port to listen on; 0 takes a free one (default: %(default)s)", 8080),
        (
            "--allow-host",
            "NAME",
            "another name of this server that requests may use, or the origin of pages that may "
            "use it, such as app://obsidian.md; repeatable",
            list,
        ),
        (
            "--api-keys",
            "FILE",
            "API keys, one a line, in a file that only you can read; requests need one of them. "
            "Each key has a prompt cache of its own",
            Path,
        ),
        (
            "--any-model",
            "",
            "answer with the first model if a request names an unknown one",
            bool,
        ),
        ("--prompt-cache", "FOLDER", "also keep processed prompts on disk, in FOLDER", Path),
        (
            "--memory",
            "GIB",
            "memory for running answers and cached prompts, besides the weights; cached prompts "
            "are evicted first (default: two thirds of the memory left after loading the weights)",
            float,
        ),
        ("--max-open", "N", "most answers at once; further ones wait (default: %(default)s)", 8),
        (
            "--max-waiting",
            "N",
            "most requests that wait; further ones get status 503 (default: %(default)s)",
            64,
        ),
        ("--timeout", "S", "seconds that a request may take (default: %(default)s)", 600.0),
    )
    add_model_options(parser, list)
    add_decoding_options(parser, max_tokens=16384)
    return parser.parse_args(argv)


def read_private_api_keys(key_file: Path | None) -> list[bytes]:
    """Return the unique keys of --api-keys, in file order. On Windows permissions are not
    checked."""
    if key_file is None:
        return []
    expected = "keys, one a line, in a file that only you can read"
    keys = read_text(key_file, expected=expected, do="check --api-keys").split()
    require(bool(keys), f"{key_file} holds no keys", expected=expected, do="write some")
    is_own = os.name != "posix" or key_file.stat().st_mode & 0o077 == 0
    require(is_own, f"others can read {key_file}", expected=expected, do=f"chmod 600 {key_file}")
    return [key.encode() for key in dict.fromkeys(keys)]


def listen_at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        found = f"cannot listen on {host}:{port} ({error})"
        expected = "an address of this machine, and a free port"
        do = "choose another"
        raise InputError(found, expected=expected, do=do) from error


def make_prompt_caches(
    disk_folder: Path | None,  # with keys, a folder in it for each, named by its hash
    api_keys: Sequence[bytes],
) -> list[PromptCache]:
    """Return a prompt cache for each key, in their order, or one for all if there are no keys. They
    share 4 GiB of disk; in memory the engine's pool alone bounds them."""
    from ..prompt_cache import PromptCache

    names = [hashlib.sha256(key).hexdigest()[:16] for key in api_keys] or [""]
    folders = [None if disk_folder is None else disk_folder / name for name in names]
    return [
        PromptCache(max_bytes=None, folder=one, max_disk_bytes=2**32 // len(names))
        for one in folders
    ]


def served_adapters(model_name: str, adapters: Sequence[str]) -> dict[str, str | None]:
    """Return the adapters by the model name that requests use, the model's own name first; None is
    the adapter that a chat takes. "auto" or "none" chooses the adapter of the model's own name; any
    other adapter gets the name MODEL:ADAPTER."""
    own = [one for one in adapters if one in (AUTO_ADAPTER, NO_ADAPTER)]
    found = f"--adapter {' and --adapter '.join(own)}"
    require(len(own) < 2, found, expected="one of them", do="omit the other")
    models: dict[str, str | None] = {model_name: NO_ADAPTER if own == [NO_ADAPTER] else None}
    for one in (one for one in adapters if one not in own):
        key = f"{model_name}:{Path(one).resolve().name if Path(one).exists() else one}"
        found = f"two adapters are called {key}"
        do = "rename one, or give its run's folder"
        require(key not in models, found, expected="a name for each", do=do)
        models[key] = one
    return models


def _serve(args: argparse.Namespace) -> None:
    asked = generate_config(args)
    keys = read_private_api_keys(args.api_keys)
    drafter: DrafterOption = args.drafter
    require_drafter_key(drafter)
    try:
        import uvicorn

        from .app import LOCAL, make_app
        from .connections import (
            ACCEPTED_AT_ONCE,
            log_refused_connections_once,
            make_connection_class,
        )
    except ImportError as error:
        raise missing_package_error("the server", error, "server") from error
    from ..engine import Engine
    from ..formats.families import UNKNOWN_CALLS
    from ..generation.plan import make_plan
    from ..mlx_thread import run_on_mlx_thread
    from ..model import metal
    from .handler import Limits, RequestHandler

    limits = Limits(open=args.max_open, waiting=args.max_waiting, time=args.timeout)
    sock = listen_at(args.host, args.port)
    metal.choose_attention(drafter.loading.attention)
    prompt_caches = make_prompt_caches(args.prompt_cache, keys)
    engine = Engine(
        args.model,
        prompt_cache=prompt_caches[0],
        memory_gb=args.memory,
        dtype=args.dtype,
        draft_head=drafter.loading.draft_head,
        progress=DownloadBar(),
    )
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    models = served_adapters(name, args.adapter or ())
    model = engine.model(models[name])
    config = with_model_sampling(args, asked, model)
    loaded = load_drafter(args, model, engine.tokenizer)
    for one in models.values():
        time_unknown_costs(
            engine.model(one), engine.tokenizer, config, loaded
        )  # also refuses a drafter that does not fit
    handler = RequestHandler(
        engine, models, prompt_caches, loaded, args.template_args or {}, limits, args.any_model
    )
    allowed = [one.rstrip("/") for one in args.allow_host or ()]
    hosts = [one.lower() for one in (*LOCAL, args.host, *allowed)]
    app = make_app(handler, config, hosts, keys)
    plan = run_on_mlx_thread(lambda: make_plan(model, config, drafter=loaded))
    print_address(sock, [*models], bool(keys), bool(allowed))
    lines = describe(model, plan, models[name] or engine.default_adapter).lines()
    calls = [UNKNOWN_CALLS] if handler.has_unknown_calls else []
    answers = answer_lines(asked, model, engine.tokenizer)
    print(*lines, *answers, *calls, sep="\n", flush=True)

    class Server(uvicorn.Server):
        """Cancels open answers before it waits for their requests to end."""

        async def startup(self, sockets: Any = None) -> None:
            log_refused_connections_once(asyncio.get_running_loop())
            await super().startup(sockets)
            sock.listen(_MOST_UNACCEPTED)

        async def shutdown(self, sockets: Any = None) -> None:
            await asyncio.to_thread(handler.close)
            await super().shutdown(sockets)

    own: Any = {
        "ws": "none",
        "lifespan": "off",
        "timeout_graceful_shutdown": 3,
        "timeout_keep_alive": limits.idle,
        "use_colors": False,
        "http": make_connection_class(limits),
        "backlog": ACCEPTED_AT_ONCE,
    }
    settings = uvicorn.Config(app, log_level="warning", **own)
    Server(settings).run(sockets=[sock])


def print_address(
    sock: socket.socket, models: Sequence[str], needs_key: bool, has_other_names: bool
) -> None:
    host, port = sock.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    headers = "-H 'Content-Type: application/json'"
    if needs_key:
        headers += ' -H "Authorization: Bearer $KEY"'
    elif host != "::1" and not host.startswith("127."):
        print("anyone who can reach this address can use the server; see --api-keys")
    if host in ("0.0.0.0", "::") and not has_other_names:
        print("requests from other machines are refused; name this one with --allow-host NAME")
    print(f"{address} has {', '.join(models)}; a chat page is at {address}/\n")
    print(f"curl {address}/v1/chat/completions {headers} -d '{BODY}'\n", flush=True)


main = make_main(PROG, parse_args, _serve)

if __name__ == "__main__":
    raise SystemExit(main())
