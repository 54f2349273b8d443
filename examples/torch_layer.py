"""A gated delta net layer in torch that keeps its states on pages, on the CPU or a GPU."""

from dataclasses import dataclass

import torch
from torch import nn

import gdn_paged

HEAD_DIM = 64  # K and V


@dataclass
class Batch:
    """What all layers of one step share: the page table and the slots made from it."""

    page_indices: torch.Tensor  # int32 [num_indices]
    page_indptr: torch.Tensor  # int32 [num_seqs + 1]
    last_page_len: torch.Tensor  # int32 [num_seqs]
    cu_seqlens: torch.Tensor | None = None  # int32 [num_seqs + 1]; None: one token each (decode)
    page_size: int = 64

    def __post_init__(self) -> None:
        self.table = {
            "page_indices": self.page_indices,
            "page_indptr": self.page_indptr,
            "last_page_len": self.last_page_len,
        }
        if self.cu_seqlens is None:
            self.table["slots"] = gdn_paged.gdn_paged_decode_slots(**self.table)
        else:
            self.table |= {"cu_seqlens": self.cu_seqlens, "page_size": self.page_size}
            self.table["slots"] = gdn_paged.gdn_paged_prefill_slots(**self.table)


class PagedGatedDeltaNet(nn.Module):
    """``x [num_tokens, width]`` to the same shape; `num_v_heads` states of HEAD_DIM squared."""

    def __init__(self, width: int, num_qk_heads: int, num_v_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dim = (num_qk_heads, num_qk_heads, num_v_heads), HEAD_DIM
        widths = [heads * HEAD_DIM for heads in (*self.heads, num_v_heads)]
        self.splits = [*widths, num_v_heads, num_v_heads]  # q, k, v, output gate, a, b
        self.project_in = nn.Linear(width, sum(self.splits), bias=False, dtype=dtype)
        self.project_out = nn.Linear(widths[2], width, bias=False, dtype=dtype)
        self.norm = nn.RMSNorm(HEAD_DIM, dtype=dtype)
        # The gate's parameters stay in float32, whatever the layer's type is.
        self.A_log = nn.Parameter(torch.empty(num_v_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((num_v_heads,), -3.0))

    def forward(self, x: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
        q, k, v, gate, a, b = self.project_in(x).split(self.splits, dim=-1)
        # Columns of one projection: read in place through their strides, not copied.
        q, k, v = (
            t.unflatten(-1, (heads, self.dim))
            for t, heads in zip((q, k, v), self.heads, strict=True)
        )
        if batch.cu_seqlens is None:
            q, k, v, a, b = (t.unsqueeze(1) for t in (q, k, v, a, b))
            y = gdn_paged.gated_delta_rule_decode_paged(
                q, k, v, self.A_log, a, self.dt_bias, b, state_pool=pool, **batch.table
            ).squeeze(1)
        else:
            y = gdn_paged.chunk_gated_delta_rule_paged(
                q,
                k,
                v,
                a,
                b,
                state_pool=pool,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                beta_is_logit=True,
                **batch.table,
            )
        y = self.norm(y) * nn.functional.silu(gate.unflatten(-1, (-1, self.dim)))
        return self.project_out(y.flatten(-2))


@torch.inference_mode()
def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    layer = PagedGatedDeltaNet(128, num_qk_heads=2, num_v_heads=4, dtype=dtype).to(device)
    pool = torch.zeros(8, 4, HEAD_DIM, HEAD_DIM, device=device)
    x = torch.randn(71, 128, device=device, dtype=dtype)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # 70 tokens by prefill and one by decode, on pages 5 and 2 ...
    prompt = Batch(int32(5, 2), int32(0, 2), int32(6), cu_seqlens=int32(0, 70))
    layer(x[:70], pool, prompt)
    last = layer(x[70:], pool, Batch(int32(5, 2), int32(0, 2), int32(7)))
    # ... and all 71 by prefill, on pages 0 and 1: the same output and the same state.
    whole = layer(x, pool, Batch(int32(0, 1), int32(0, 2), int32(7), cu_seqlens=int32(0, 71)))
    tolerance = 2e-2 if on_gpu else 1e-4
    for name, got, expected in (("output", last[0], whole[70]), ("state", pool[2], pool[1])):
        error = ((got - expected).norm() / expected.norm()).item()
        print(f"{name}: decode and prefill differ by {error:.1e} (relative L2) on {device}")
        assert error <= tolerance


if __name__ == "__main__":
    main()
