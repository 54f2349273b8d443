"""One prompt over several devices: each runs the tokens it holds without waiting for those before.

Over a run of tokens the state moves by an affine map, per state head ::

    S_end = S_start M + N        M [K, K], N [V, K]

(the products of ``alpha_t (I - beta_t k_t k_t^T)``, and where the zero state ends). So a device
computes M and N of its segment, sends these 128 KB a head (K = V = 128) to the devices behind,
forms the state before its segment from the maps it received, and runs its tokens from there::

    first    part = segment_begin(...)                                  offset is the state after it
    middle   part = segment_begin(..., initial_state=buffer)            transition and offset
    last     part = segment_begin(..., initial_state=buffer, last=True)
             exchange part.transition and part.offset
             segment_combine(transitions, offsets, state=buffer)
             output = part.finish()
"""

from __future__ import annotations

from typing import Any, Generic, Literal

from . import _core
from ._typing import A, DLPackArray, Index, Stream
from .prefill import PAGED_ORDER
from .slots import GDNPagedPrefillSlots


class Segment(Generic[A]):
    """A segment that has begun: its map, and the call that finishes it.

    Attributes:
        transition: M, fp32 ``[H, K, K]``; None of a first and of a last segment.
        offset: N, fp32 ``[H, V, K]``, of a first segment the state after it; None of a last one.
    """

    transition: A | None
    offset: A | None

    def __init__(
        self, arguments: tuple[Any, ...], part: tuple[Any, Any, Any, Any], last: bool
    ) -> None:
        output, workspace, self.transition, self.offset = _core.segment_begin(arguments, part, last)
        place = PAGED_ORDER.index("output")
        self._arguments: tuple[Any, ...] | None = (
            *arguments[:place], output, *arguments[place + 1 :],
        )  # fmt: skip
        self._part = (part[0], self.transition, self.offset, workspace)

    def finish(self) -> A:
        """Runs the tokens from initial_state, once; on the stream that began.

        Returns:
            output ``[T, H, V]``; page ends and the final state are on their pages.

        Raises:
            ValueError, NotImplementedError, RuntimeError: as :func:`segment_begin`; ValueError
                also for a second call.
        """
        if self._arguments is None:
            raise ValueError("finish: called before; expected one finish of a segment")
        arguments, self._arguments = self._arguments, None
        return _core.segment_finish(arguments, self._part)


def segment_begin(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    g: DLPackArray | None = None,
    beta: DLPackArray | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: DLPackArray,
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    page_size: Index,
    last_page_len: DLPackArray,
    initial_state: A | None = None,
    last: bool = False,
    transition: A | None = None,
    offset: A | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: A | None = None,
    gate_domain: Literal["linear", "log"] = "linear",
    use_gate_in_kernel: bool = False,
    A_log: DLPackArray | None = None,
    dt_bias: DLPackArray | None = None,
    beta_is_logit: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    initial_page_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    stream: Stream | None = None,
    workspace: A | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> Segment[A]:
    """Begins a prefill of one sequence whose tokens before these may lie on other devices.

    Does all that does not depend on the state before the tokens, and forms their map. Pool and
    output are written by :meth:`Segment.finish`; until then the arguments must stay as they are,
    except for the contents of initial_state.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, state_pool, page_indices, page_indptr, page_size,
        last_page_len, use_qk_l2norm_in_kernel, output, gate_domain, use_gate_in_kernel, A_log,
        dt_bias, beta_is_logit, slots, initial_page_indices, allow_unaligned_pages, stream,
        num_threads, backend: as in :func:`chunk_gated_delta_rule_paged`, for one sequence. Its
            prefix are the tokens of the segments before; their pages may be -1 in the table.
        initial_state: fp32 ``[H, V, K]``, read when the segment is finished; None: a first
            segment, which starts from the page before it, or from zero.
        last: no device asks for the map of this segment.
        transition: fp32 ``[H, K, K]``, written; None: allocated by the framework of q.
        offset: fp32 ``[H, V, K]``, written; None: allocated by the framework of q.
        workspace: 1-D uint8 scratch memory, untouched until the segment is finished; None:
            allocated by the framework of q.

    Returns:
        The segment, with ``transition`` and ``offset``. A broken table gives the map of no token.

    Raises:
        ValueError: names the argument, what came and what is expected.
        NotImplementedError: no kernel row serves the call; the text holds every row's reason.
        RuntimeError: the CUDA runtime failed, or this build has no kernels for the device.
    """
    if last and (transition is not None or offset is not None):
        raise ValueError("last: True with a transition or an offset; expected None for both")
    given = locals()
    return Segment(
        tuple(given.get(name) for name in PAGED_ORDER),
        (initial_state, transition, offset, workspace),
        last,
    )


def segment_combine(
    transitions: A,
    offsets: A,
    *,
    initial_state: DLPackArray | None = None,
    state: A | None = None,
    stream: Stream | None = None,
    num_threads: int = 0,
) -> A:
    """The state behind segments: ``(initial_state M_0 + N_0) M_1 + N_1 ...``, in fp32.

    Args:
        transitions: fp32 ``[num_maps, H, K, K]``, each map dense.
        offsets: fp32 ``[num_maps, H, V, K]``, each map dense.
        initial_state: fp32 ``[H, V, K]``; None: zero, and ``transitions[0]`` is not read.
        state: fp32 ``[H, V, K]``, written, may be initial_state; None: allocated.
        stream, num_threads: as in :func:`chunk_gated_delta_rule_paged`.

    Returns:
        state. Zeros of M drop what a state holds there even if it is not finite.

    Raises:
        ValueError: names the argument, what came and what is expected.
        RuntimeError: the CUDA runtime failed, or this build has no kernels for the device.
    """
    return _core.segment_combine((
        transitions, offsets, initial_state, state, stream, num_threads,
    ))  # fmt: skip
