"""What tells base models, and sets of weights, from each other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import InputError, require

NORM_PROBE_LENGTH = 32
_PROBE_TOLERANCE = 0.02
_DIGEST_VALUES = 64


def digest_sampled_values(tensors: Iterable[tuple[str, mx.array]]) -> str:
    """A quick digest of named arrays: of their names, shapes, dtypes, and about 64 values each.

    The values stand at equal distances in the flattened array; of fewer than 128 all are taken. It
    takes milliseconds, and waits for the device to compute the values.

    Args:
        tensors: names and arrays; their order counts.

    Returns:
        32 hexadecimal digits. Arrays that differ only in other values get the same.
    """
    samples = []
    for name, array in tensors:
        stride = max(1, array.size // _DIGEST_VALUES) | 1  # odd, to meet every column
        values = array.flatten()[::stride]
        exact = values.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else values
        samples.append((f"{name} {array.dtype} {array.shape}", mx.contiguous(exact)))
    mx.eval([values for _, values in samples])
    digest = hashlib.sha256()
    for name, values in samples:
        digest.update(name.encode() + np.asarray(values).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class BaseIdentity:
    """What tells one base model from another, in whatever precision it is stored."""

    model_type: str  # mlx-lm's name of the architecture
    num_layers: int
    hidden_size: int
    vocab_size: int
    # the first weights of its final norm, which no quantisation touches
    norm_probe: tuple[float, ...]

    @classmethod
    def from_settings(cls, path: Path, values: Mapping[str, Any]) -> BaseIdentity:
        """The identity of the base model that a settings file names in its entry `base`.

        Args:
            path: of the file, for the message; it is not read.
            values: its content, whose entry `base` is a mapping with exactly this class's fields.

        Raises:
            InputError: `base` is missing or has other fields; a size is no int; or `norm_probe` is
                no list of finite numbers.
        """
        base: Any = values.get("base")
        sizes = ("num_layers", "hidden_size", "vocab_size")
        try:
            probe = tuple(map(float, base["norm_probe"]))
            if not all(map(math.isfinite, probe)) or any(
                type(base[one]) is not int for one in sizes
            ):
                raise ValueError
            return cls(**{**base, "norm_probe": probe})
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise InputError(
                f"{path} does not say which base model it is for",
                expected="an entry `base`",
                do="convert it again",
            ) from error

    def require_same(self, other: BaseIdentity, found: str, *, expected: str, do: str) -> None:
        """Raise an error unless `other` is the same base model, see `find_difference`.

        Args:
            other: the identity of the model in use; this one's is what something was made for.
            found: the beginning of the message, subject and verb, such as "the heads belong".
            expected: what was expected, for the message.
            do: what the user can do, for the message.

        Raises:
            InputError: the models differ; the message names the first difference.
        """
        difference = self.find_difference(other)
        found += f" to another base model: this one has {difference}"
        require(difference is None, found, expected=expected, do=do)

    def find_difference(self, other: BaseIdentity) -> str | None:
        """Say in words what is other in the model `other`; None if they are the same model.

        The first difference of model type, number of layers, D, V and final norm. Each norm weight
        may differ by 0.02, or by 2 % where it is larger than 1, for precision; their number may
        not.
        """
        for name in ("model_type", "num_layers", "hidden_size", "vocab_size"):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        pairs = zip_longest(self.norm_probe, other.norm_probe, fillvalue=math.nan)
        if not all(abs(a - b) <= _PROBE_TOLERANCE * max(1.0, abs(a)) for a, b in pairs):
            return "other weights (its final norm differs)"
        return None
