"""Arrays that end (or begin) at memory no one may touch: any access past them is a SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.11
_libc = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, bytes_: int) -> None:
    PROT_NONE = 0
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(bytes_), PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class GuardedMemory:
    """Keeps the mappings of a test's arrays alive."""

    def __init__(self):
        self._maps: list[mmap.mmap] = []

    def array(self, x: np.ndarray, at_end: bool = True) -> np.ndarray:
        """A copy of `x` whose last (or first) byte lies next to an inaccessible page."""
        data_pages = max(-(-x.nbytes // PAGE), 1)
        region = mmap.mmap(-1, (data_pages + 2) * PAGE)
        self._maps.append(region)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        offset = PAGE if not at_end else (1 + data_pages) * PAGE - x.nbytes
        view = np.frombuffer(region, np.uint8, x.nbytes, offset).view(x.dtype).reshape(x.shape)
        view[...] = x
        _protect(start, PAGE)
        _protect(start + (1 + data_pages) * PAGE, PAGE)
        return view


def shifted(x: np.ndarray, elements: int = 1, alignment: int = 256) -> np.ndarray:
    """A copy of `x` whose data starts `elements` elements past an aligned address."""
    raw = np.zeros(x.nbytes + 2 * alignment + elements * x.itemsize, np.uint8)
    base = -raw.ctypes.data % alignment + elements * x.itemsize
    view = raw[base : base + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def reserved(rows: int, row_shape: tuple[int, ...], row_stride: int, dtype) -> np.ndarray:
    """A pool over address space that costs memory only where it is touched (MAP_NORESERVE)."""
    itemsize = np.dtype(dtype).itemsize
    bytes_ = ((rows - 1) * row_stride + int(np.prod(row_shape))) * itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    region = mmap.mmap(-1, bytes_, flags=flags)
    inner = [int(np.prod(row_shape[i + 1 :])) * itemsize for i in range(len(row_shape))]
    flat = np.frombuffer(region, dtype)
    strides = (row_stride * itemsize, *inner)
    return np.lib.stride_tricks.as_strided(flat, (rows, *row_shape), strides)
