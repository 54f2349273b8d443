"""Speculative decoding on a paged pool: several draft tokens a step, any prefix of them kept.

The rule and the gates of :mod:`gdn_paged.decode`. One step does two things in one pass over the
states: it folds the draft tokens that were accepted since the last step into the pages, and it runs
the new draft tokens from there and returns their outputs. The new tokens leave the pages alone;
what each of them would add to a state waits in ``drafts`` (k, its update u and its decay)::

    S_t = alpha_t * S_{t-1} + u_t k_t^T

so nothing that a rejected token touched survives, and a state is read and written once per step.
"""

from __future__ import annotations

from typing import Literal

from . import _core
from ._typing import A, DLPackArray, Index, Stream
from ._unbacked import registered

IoDtype = Literal["float32", "bfloat16", "float16"]

VERIFY_ORDER = (
    *("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale", "output", "use_qk_l2norm"),
    *("stream", "deterministic", "num_threads", "backend", "cu_seqlens", "state_pool"),
    *("page_indices", "page_indptr", "page_size", "seq_lens", "drafts", "max_draft", "accepted"),
    *("draft_indices", "allow_unaligned_pages"),
)
_DTYPES = {"float32": 0x220, "bfloat16": 0x410, "float16": 0x210}


def dtype_code(dtype: str) -> int:
    """The C API's code of an io dtype."""
    code = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if code is None:
        raise ValueError(f'dtype: {dtype!r}; expected "float32", "bfloat16" or "float16"')
    return code


def verify_draft_size(
    max_draft: int, num_heads: int, head_dim_k: int, head_dim_v: int, dtype: IoDtype
) -> int:
    """Bytes of one slot of a draft buffer, the second dimension of ``drafts``.

    Args:
        max_draft: most draft tokens of a sequence in one step, 1 to 8.
        num_heads: state heads, ``H = max(Hq, Hv)``.
        head_dim_k, head_dim_v: K and V.
        dtype: of q, k and v.

    Raises:
        ValueError: names the argument, what came and what is expected.
    """
    return _core.verify_draft_size(max_draft, num_heads, head_dim_k, head_dim_v, dtype_code(dtype))


def gated_delta_rule_verify_paged(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    A_log: DLPackArray,
    a: DLPackArray,
    dt_bias: DLPackArray | None,
    b: DLPackArray,
    scale: float | None = None,
    output: A | None = None,
    use_qk_l2norm: bool = True,
    *,
    cu_seqlens: DLPackArray,
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    page_size: Index,
    seq_lens: DLPackArray,
    drafts: DLPackArray,
    max_draft: Index,
    accepted: DLPackArray | None = None,
    draft_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    backend: str = "auto",
    stream: Stream | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
) -> A:
    """Folds the accepted draft tokens of the last step and runs the new ones.

    Sequence i has the new tokens ``cu_seqlens[i]:cu_seqlens[i + 1]``, at most max_draft. Before
    them stand ``seq_lens[i]`` tokens, whose last ``accepted[i]`` are the first draft tokens of its
    last step. They are folded by the page rules of a prefill of so many tokens: the page of the
    token before them is read, the page end they cross is stored and the page of the last of them.
    ``page_indices[page_indptr[i]:page_indptr[i + 1]]`` holds the pages of those tokens in order and
    may go on with pages for later ones. The loop of an engine, all on the device::

        accepted = zeros(num_seqs)              # after a prefill or a decode
        while True:
            output = verify(..., seq_lens, accepted)
            accepted = choose(output)           # 0 to the number of new tokens
            seq_lens += accepted

    Before anything else reads the pages (a decode, a prefill, another sequence that shares them)
    :func:`gated_delta_rule_commit_paged` folds what is still waiting.

    A sequence with an empty page list is padding: its outputs are zero. One whose tables are
    broken, that has more than max_draft new tokens, or that accepts more than its last step had (or
    the same tokens twice) stores nothing, and its outputs are zero. A page id of -1 reads the zero
    state and writes nothing.

    Args:
        q: ``[tokens, Hq, K]``, fp32 (CPU only), bf16 or fp16; last dimension dense, others free.
        k: ``[tokens, Hk, K]``, the dtype of q.
        v: ``[tokens, Hv, V]``, the dtype of q.
        A_log: ``[H]``, fp32, bf16 or fp16, as a, dt_bias and b.
        a: decay logits ``[tokens, H]``.
        dt_bias: ``[H]``; None: 0.
        b: beta logits ``[tokens, H]``.
        scale: of the output; None: ``1 / sqrt(K)``. A scale of 0 is 0 here.
        output: ``[tokens, H, V]``, the dtype of q; None: allocated by the framework of q.
        use_qk_l2norm: q and k become ``x * rsqrt(sum(x**2) + 1e-6)`` in fp32, not rounded.
        cu_seqlens: int32 or int64 ``[num_seqs + 1]``, as all tables here.
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16; rows dense, their stride free.
        page_indices: ``[num_indices]``.
        page_indptr: ``[num_seqs + 1]``.
        page_size: tokens of a page, a positive multiple of 64, or see allow_unaligned_pages.
        seq_lens: ``[num_seqs]``, tokens before the new ones, accepted draft tokens included.
        drafts: uint8 ``[slots, verify_draft_size(...)]``, of this layer; its first content does not
            matter, later only these calls write it.
        max_draft: 1 to 8, as in verify_draft_size, the same in all steps.
        accepted: ``[num_seqs]``, how many draft tokens of the last step are kept; None: none.
        draft_indices: ``[num_seqs]``, the slot of drafts that a sequence keeps from step to step,
            all distinct; -1: no slot, nothing can be accepted later. None: slot i.
        allow_unaligned_pages: page_size may be any number above 8.
        backend: "auto", or the name of a row of :func:`kernel_rows`.
        stream: of the launch on CUDA, an int or an object with ``__cuda_stream__``; None: the
            current stream of q's framework.
        deterministic: "batch": a sequence gives the same bytes whatever else is in the batch.
        num_threads: of the CPU; 0: all.

    Returns:
        output.

    Raises:
        ValueError: names the argument, what came and what is expected.
        NotImplementedError: no kernel row serves the call; the text holds every row's reason.
        RuntimeError: the CUDA runtime failed, or this build has no kernels for the device.
    """
    arguments = (
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        stream, deterministic, num_threads, backend, cu_seqlens, state_pool,
        page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted, draft_indices,
        allow_unaligned_pages,
    )  # fmt: skip
    try:
        return _core.verify_paged(arguments)
    except _core.UnbackedTensorError:
        return registered("verify_paged")(**dict(zip(VERIFY_ORDER, arguments, strict=True)))


def gated_delta_rule_commit_paged(
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    page_size: Index,
    seq_lens: DLPackArray,
    drafts: DLPackArray,
    max_draft: Index,
    accepted: DLPackArray | None,
    draft_indices: DLPackArray | None = None,
    *,
    dtype: IoDtype,
    allow_unaligned_pages: bool = False,
    backend: str = "auto",
    stream: Stream | None = None,
    num_threads: int = 0,
) -> None:
    """Folds the accepted draft tokens into the pages, without new ones, and empties the slots.

    After it the pages hold ``seq_lens[i]`` tokens, and the next step of a sequence accepts 0.

    Args:
        state_pool, page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted,
        draft_indices, allow_unaligned_pages, backend, stream, num_threads: as in
            :func:`gated_delta_rule_verify_paged`.
        dtype: of the q, k and v that the draft tokens came from.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as in :func:`gated_delta_rule_verify_paged`.
    """
    arguments = (
        state_pool, page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted,
        draft_indices, dtype_code(dtype), stream, num_threads, backend, allow_unaligned_pages,
    )  # fmt: skip
    try:
        _core.commit_paged(arguments)
    except _core.UnbackedTensorError:
        registered("commit_paged")(
            *arguments[:9], dtype=dtype, allow_unaligned_pages=allow_unaligned_pages,
            stream=stream, num_threads=num_threads, backend=backend,
        )  # fmt: skip
