"""Token ids as int32 and log-probs as float64, little endian, in a column of bytes: exact, and small."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any


def pack_ids(ids: Sequence[int]) -> bytes:
    return _bytes(array("i", ids))


def unpack_ids(data: bytes) -> array[int]:
    return _array("i", data)


def pack_floats(values: Sequence[float]) -> bytes:
    return _bytes(array("d", values))


def unpack_floats(data: bytes) -> array[float]:
    return _array("d", data)


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _array(code: str, data: bytes) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
