"""Timing on one GPU, as `python -m gdn_paged bench` does it."""

from gdn_paged._bench.machine import Step
from gdn_paged._bench.torch_cuda import (
    burst_us,
    capture,
    copy_bandwidth,
    elapsed_us,
    graph_us,
    host_us,
)

__all__ = ["Step", "burst_us", "capture", "copy_bandwidth", "elapsed_us", "graph_us", "host_us"]
