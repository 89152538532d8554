"""Which files hold a folder's tensors, and where in them, by indices and headers alone.

Light on purpose: no weights are read, and MLX is not imported.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..json_files import parse_json
from .folders import files_in_weight_index

_MOST_HEADER = 2**28


@dataclass(frozen=True)
class StoredTensor:
    """Where the bytes of a tensor lie: from `begin` to below `end` of the file `path`."""

    name: str
    kind: str  # its type and shape, as the header says them
    path: Path
    begin: int
    end: int

    @property
    def dtype(self) -> str:
        """The name of its type, such as "BF16"."""
        return self.kind.partition(" ")[0]


def read_header(path: Path) -> Iterator[StoredTensor]:
    """Yield where each tensor of a safetensors file lies, from the file's header, in its order.

    Raises:
        InputError: the header cannot be read, or is larger than `_MOST_HEADER` bytes.
        OSError: the file cannot be read.
    """
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
    """Return the safetensors files that hold the tensors of a model's folder, or a head's, by name.

    They are those that its index names, there or not; `model*.safetensors`, which mlx-lm reads
    whatever the index says; and files with "mtp" in their names, by which heads are added to a
    folder whose index does not know them. Without an index, all that are there.

    Raises:
        InputError: the index cannot be read.
    """
    indexed = files_in_weight_index(folder)
    if indexed is None:
        return sorted(folder.glob("*.safetensors"))
    beside = ("model*.safetensors", "*mtp*.safetensors")
    return sorted({*indexed, *(path for one in beside for path in folder.glob(one))})


def tensor_names(folder: Path) -> dict[str, Path]:
    """Return the names of all tensors in a folder's `weight_files`, each with its file.

    Of a name that stands in several files, the last of these is returned.

    Raises:
        InputError: the index, or a file's header, cannot be read.
        OSError: a file is missing or cannot be read.
    """
    return {one.name: path for path in weight_files(folder) for one in read_header(path)}
