"""Where calls run: every (framework, device, kernel row) that this machine can serve."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from hypothesis import currently_in_test_context, reject

from arrays import NATIVE, CupyArrays, NumpyArrays, TorchArrays, bits_of, native
from calls import Case, Decode, DecodeSlots, PageTable, Prefill, Slots
from compare import Result

SENTINEL = 123.0


def is_unserved(error: BaseException) -> bool:
    """Whether the forced row cuda_sm90 refused what README gives to cuda_portable."""
    reason = "head_dim is not 128|not 16-byte rows|not aligned to pairs"
    return re.search(f"'cuda_sm90' refuses.*: .*({reason})", str(error)) is not None


def unaligned(page_size: int) -> dict[str, bool]:
    return {"allow_unaligned_pages": True} if page_size % 64 else {}


@dataclass(eq=False)
class PoolArray:
    """A pool in its framework: `view` [rows, H, V, K] of `base` [rows, H V K + gap]."""

    view: Any
    base: Any
    start_bits: np.ndarray = field(repr=False)  # of base


@dataclass(eq=False)
class Target:
    """One framework, one device, one kernel row per operation."""

    arrays: Any
    prefill_row: str
    decode_row: str

    def __str__(self) -> str:
        return f"{self.arrays.name}-{self.prefill_row}"

    def arithmetic(self, io: str) -> str:
        """The dtype that a prefill multiplies in, which sets its tolerance."""
        return "bf16" if io == "fp16" and self.prefill_row == "cuda_portable" else io

    @property
    def head_size(self) -> int:
        """Of calls that name none."""
        return 128 if self.prefill_row == "cuda_sm90" else 64

    @property
    def device(self) -> str:
        return self.arrays.device.split(":")[0]

    # ---- conversion -------------------------------------------------------------------------
    def array(self, x: np.ndarray, dtype: str, layout: str = "dense") -> Any:
        """`x` in the framework. "padded": strides with poison between; "swapped": dims 0 and 1
        exchanged in memory; the last dimension of a rank-3 operand is dense in all of them."""
        x = native(x, dtype)
        if layout == "padded":
            base = np.full((x.shape[0], *(n + 3 for n in x.shape[1:])), np.nan).astype(x.dtype)
            inside = tuple(slice(0, n) for n in x.shape)
            base[inside] = x
            return self.arrays.array(base)[inside]
        if layout == "swapped":
            return self.arrays.array(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1)
        return self.arrays.array(np.ascontiguousarray(x))

    def table(self, x: np.ndarray | None, dtype: str = "int32") -> Any:
        return None if x is None else self.arrays.array(np.asarray(x, NATIVE[dtype]))

    def pool(self, x: np.ndarray, dtype: str = "fp32", gap: int = 0) -> PoolArray:
        rows, size = len(x), int(np.prod(x.shape[1:]))
        base = np.full((rows, size + gap), SENTINEL)
        base[:, :size] = x.reshape(rows, size)
        array = self.arrays.array(native(base, dtype))
        return PoolArray(array[:, :size].reshape(x.shape), array, self.bits(array).copy())

    def values(self, x: Any) -> np.ndarray:
        return self.arrays.numpy(x).astype(np.float64)

    def bits(self, x: Any) -> np.ndarray:
        return bits_of(self.arrays.numpy(x))

    # ---- arguments of the Python calls ------------------------------------------------------
    def prefill_arguments(
        self, call: Prefill, io: str, *, layout="dense", index_dtype="int32", gate_dtype="fp32"
    ) -> dict[str, Any]:
        """Keyword arguments of either prefill function, without its pools."""
        raw, rows = call.gate == "raw", call.rows
        arguments = {
            name: self.array(getattr(call, name), io, layout) for name in ("q", "k", "v")
        } | {
            name: None if x is None else self.array(x, gate_dtype, layout)
            for name, x in (("g", call.g), ("beta", call.beta))
        }
        arguments |= {
            "scale": call.scale,
            "use_qk_l2norm_in_kernel": call.l2norm,
            "beta_is_logit": call.beta_is_logit,
            "gate_domain": "linear" if raw else call.gate,
            "use_gate_in_kernel": raw,
            "cu_seqlens": self.table(rows.cu_seqlens, index_dtype),
            "backend": self.prefill_row,
        }
        if raw:
            arguments |= {
                name: None if x is None else self.array(x, gate_dtype)
                for name, x in (("A_log", call.A_log), ("dt_bias", call.dt_bias))
            }
        if isinstance(rows, PageTable):
            pages = self.page_arguments(rows, index_dtype) | {"page_size": rows.page_size}
            return arguments | pages | unaligned(rows.page_size)
        return arguments | self.slot_arguments(rows, index_dtype)

    def page_arguments(self, table: PageTable, index_dtype="int32") -> dict[str, Any]:
        names: tuple[tuple[str, str], ...]
        names = (("page_indices", "indices"), ("page_indptr", "indptr"), ("last_page_len",) * 2)
        if table.initial_pages is not None:
            names += (("initial_page_indices", "initial_pages"),)
        return {name: self.table(getattr(table, source), index_dtype) for name, source in names}

    def slot_arguments(self, slots: Slots, index_dtype="int32") -> dict[str, Any]:
        names = (
            "state_indices",
            "output_state_indices",
            "checkpoint_state_indices",
            "checkpoint_cu_starts",
            "prefix_lens",
        )
        tables = {name: self.table(getattr(slots, name), index_dtype) for name in names}
        every = {"checkpoint_every_n_tokens": slots.checkpoint_every}
        return tables | every | unaligned(slots.checkpoint_every)

    def decode_arguments(
        self, call: Decode, io: str, *, layout="dense", index_dtype="int32", gate_dtype="fp32"
    ) -> dict[str, Any]:
        """Keyword arguments of either decode function, without its pools."""
        if layout == "fused":
            operands = self._fused(call, io)
        else:
            operands = {x: self.array(getattr(call, x), io, layout) for x in ("q", "k", "v")}
            operands |= {x: self.array(getattr(call, x), gate_dtype, layout) for x in ("a", "b")}
        arguments = {name: x[:, None] for name, x in operands.items()}
        arguments |= {x: self.array(getattr(call, x), "fp32") for x in ("A_log", "dt_bias")}
        arguments |= {"scale": call.scale, "use_qk_l2norm": call.l2norm}
        if isinstance(call.rows, DecodeSlots):
            return arguments | {
                "initial_state_indices": self.table(call.rows.initial, index_dtype),
                "output_state_indices": self.table(call.rows.output, index_dtype),
            }
        return arguments | self.page_arguments(call.rows, index_dtype)

    def _fused(self, call: Decode, io: str) -> dict[str, Any]:
        """q, k and v as slices of one row, a and b as interleaved columns of another."""
        B = len(call.q)
        parts = [x.reshape(B, -1) for x in (call.q, call.k, call.v)]
        ends = np.cumsum([0] + [x.shape[1] for x in parts])
        row = self.array(np.concatenate(parts, axis=1), io)
        columns = self.array(np.stack([call.a, call.b], axis=2).reshape(B, -1), io)
        slices = {
            name: row[:, ends[i] : ends[i + 1]].reshape(getattr(call, name).shape)
            for i, name in enumerate(("q", "k", "v"))
        }
        return slices | {"a": columns[:, 0::2], "b": columns[:, 1::2]}

    # ---- calls ------------------------------------------------------------------------------
    def prefill(self, call: Prefill, pool: Any, io="fp32", *, options=None, **forms) -> Any:
        """Paged prefill on a framework pool; `options` go to the call, `forms` to the arguments."""
        import gdn_paged

        arguments = self.prefill_arguments(call.cast(io), io, **forms) | (options or {})
        return self.serve(gdn_paged.chunk_gated_delta_rule_paged, arguments, state_pool=pool)

    def decode(self, call: Decode, pool: Any, io="fp32", *, options=None, **forms) -> Any:
        """Paged decode; the output is [B, 1, H, V]."""
        import gdn_paged

        arguments = self.decode_arguments(call.cast(io), io, **forms)
        arguments |= {"backend": self.decode_row} | (options or {})
        return gdn_paged.gated_delta_rule_decode_paged(**arguments, state_pool=pool)

    def slot_prefill(self, call: Prefill, io="fp32", *, options=None, **forms) -> Any:
        """Slot and packed form; the pools come in `options`."""
        import gdn_paged

        arguments = self.prefill_arguments(call.cast(io), io, **forms) | (options or {})
        return self.serve(gdn_paged.chunk_gated_delta_rule, arguments)

    def slot_decode(self, call: Decode, io="fp32", *, options=None, **forms) -> Any:
        """Slot form of decode; `state` or `initial_state` comes in `options`."""
        import gdn_paged

        arguments = self.decode_arguments(call.cast(io), io, **forms)
        arguments |= {"state": None, "backend": self.decode_row} | (options or {})
        return gdn_paged.gated_delta_rule_decode_pretranspose(**arguments)

    def serve(self, function: Callable[..., Any], arguments: dict[str, Any], **pools: Any) -> Any:
        """The call; a drawn call that its forced row does not serve is drawn again."""
        try:
            return function(**arguments, **pools)
        except NotImplementedError as error:
            if is_unserved(error) and currently_in_test_context():
                reject()
            raise

    def run(self, case: Case, io: str) -> Result:
        pool = self.pool(case.pool, case.state_dtype, case.row_padding)
        before, outs = self.bits(pool.view).copy(), []
        forms = {"layout": case.layout, "index_dtype": case.index_dtype}
        for call in case.calls:
            if isinstance(call, Prefill):
                outs.append(self.values(self.prefill(call, pool.view, io, **forms)))
            else:
                outs.append(self.values(self.decode(call, pool.view, io, **forms))[:, 0])
        size = int(np.prod(case.pool.shape[1:]))
        gap = np.array_equal(self.bits(pool.base)[:, size:], pool.start_bits[:, size:])
        return Result(outs, self.values(pool.view), before, self.bits(pool.view), gap)


@cache
def available_targets() -> tuple[Target, ...]:
    """NumPy and torch on the CPU; torch and CuPy on every prefill row of a GPU that is present."""
    found = [Target(NumpyArrays(), "cpu", "cpu")]
    gpu_frames: list[Any] = []
    if importlib.util.find_spec("torch"):
        found.append(Target(TorchArrays("cpu"), "cpu", "cpu"))
        if found[-1].arrays.torch.cuda.is_available():
            gpu_frames.append(TorchArrays("cuda"))
    if importlib.util.find_spec("cupy"):
        import cupy

        if cupy.cuda.is_available():
            gpu_frames.append(CupyArrays())
    for frame in gpu_frames:
        found += [Target(frame, row, "cuda") for row in cuda_prefill_rows()]
    return tuple(found)


def cuda_prefill_rows() -> list[str]:
    """The CUDA rows that the installed library holds, in order of preference."""
    import gdn_paged

    names = [row.name for row in gdn_paged.kernel_rows("prefill_paged")]
    return [name for name in names if name.startswith("cuda")]
