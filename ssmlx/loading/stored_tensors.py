"""Which files hold a folder's tensors, and where in them, by indices and headers alone.

Light on purpose: no weights are read, and MLX is not imported.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..json_files import parse_json
from .folders import files_in_weight_index

MEDUSA_PREFIX = "medusa_head."  # of Medusa heads that are among the model's own weights (Medusa-2)
MTP_PREFIX = "mtp."  # of a head for multi-token prediction; another prefix may come first
_MOST_HEADER = 2**28  # bytes


@dataclass(frozen=True)
class StoredTensor:
    """The bytes of a tensor: from `begin` to below `end` of the file `path`."""

    name: str
    kind: str  # type and shape, as in the header
    path: Path
    begin: int
    end: int

    @property
    def dtype(self) -> str:
        """The type in the header, such as "BF16"."""
        return self.kind.partition(" ")[0]


def read_header(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, in the header's order."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError
            header = parse_json(file.read(size))
        for name, one in header.items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                kind = f"{one['dtype']} {one['shape']}"
                yield StoredTensor(name, kind, path, 8 + size + int(begin), 8 + size + int(end))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} has no header that can be read",
            expected="a whole safetensors file",
            do="download the model again",
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's or a head's folder; its index may name missing ones."""
    # mlx-lm reads model*.safetensors whatever the index says. Heads are added to a folder by files
    # with "mtp" in their names, which its index does not know.
    indexed = files_in_weight_index(folder)
    if indexed is None:
        return sorted(folder.glob("*.safetensors"))
    beside = ("model*.safetensors", "*mtp*.safetensors")
    return sorted({*indexed, *(path for one in beside for path in folder.glob(one))})


def tensor_names(folder: Path) -> dict[str, Path]:
    """All tensors in a folder's `weight_files`, each with the last file that has it."""
    return {one.name: path for path in weight_files(folder) for one in read_header(path)}


def is_mtp_name(name: str) -> bool:
    return name.startswith(MTP_PREFIX) or f".{MTP_PREFIX}" in name


def is_head_name(name: str) -> bool:
    """Whether a tensor of a model's own weights is a drafting head's: a Medusa or an MTP head."""
    return name.startswith(MEDUSA_PREFIX) or is_mtp_name(name)
