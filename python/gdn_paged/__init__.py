"""Gated Delta Net prefill and decode on a paged recurrent-state pool.

Every function takes arrays of PyTorch, NumPy, CuPy or any other library with DLPack, on the CPU or
on a CUDA device, and writes in place. Importing this package imports none of them.
"""

from __future__ import annotations

from .decode import gated_delta_rule_decode_paged, gated_delta_rule_decode_pretranspose
from .dispatch import KernelRow, build_info, explain, has_cuda, kernel_rows, preload, version
from .page_table import (
    PageStats,
    PageTableReport,
    page_stats,
    page_table_report,
    validate_page_table,
)
from .prefill import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_paged,
    prefill_plan,
    prefill_workspace_size,
)
from .segment import Segment, segment_begin, segment_combine
from .slots import (
    GDNPagedDecodeSlots,
    GDNPagedPrefillSlots,
    gdn_paged_decode_slots,
    gdn_paged_prefill_slots,
)
from .verify import (
    gated_delta_rule_commit_paged,
    gated_delta_rule_verify_paged,
    verify_draft_size,
)

__version__ = version()

__all__ = [
    "GDNPagedDecodeSlots",
    "GDNPagedPrefillSlots",
    "KernelRow",
    "PageStats",
    "PageTableReport",
    "Segment",
    "__version__",
    "build_info",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_paged",
    "explain",
    "gated_delta_rule_commit_paged",
    "gated_delta_rule_decode_paged",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_verify_paged",
    "gdn_paged_decode_slots",
    "gdn_paged_prefill_slots",
    "has_cuda",
    "kernel_rows",
    "page_stats",
    "page_table_report",
    "prefill_plan",
    "prefill_workspace_size",
    "preload",
    "segment_begin",
    "segment_combine",
    "validate_page_table",
    "verify_draft_size",
    "version",
]
