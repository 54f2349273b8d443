"""Paged states for the gated delta net layers of Hugging Face's Qwen3-Next and Qwen3.5.

A page of a sequence holds, for every layer, what the layer remembers after the page's last token:
the recurrent state [H, V, K] and the last inputs of the causal convolution. Both follow one rule,
so one page number stands for both. `gdn_paged` reads and writes the recurrent states; the
convolution is the engine's own (most fuse it with something), so its states are indexed here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import gdn_paged


@dataclass
class Sequence:
    """Tokens that have been through the model, and the pages that hold their states."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PageAllocator:
    """Free pages, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, -1, -1))
        self.holders: Counter[int] = Counter()

    def share(self, pages: list[int]) -> list[int]:
        self.holders.update(pages)
        return list(pages)

    def extend(self, sequence: Sequence, length: int, page_size: int) -> None:
        """Pages for `length` tokens in all."""
        missing = -(-length // page_size) - len(sequence.pages)
        if missing > len(self.free):
            raise RuntimeError(f"{missing} pages needed, {len(self.free)} are free")
        sequence.pages += self.share([self.free.pop() for _ in range(missing)])

    def release(self, sequence: Sequence) -> None:
        self.holders.subtract(sequence.pages)
        self.free += [page for page in sequence.pages if self.holders[page] == 0]
        sequence.pages, sequence.length = [], 0


class Step:
    """One forward pass over new tokens of some sequences: everything that all layers share."""

    def __init__(self, sequences: list[Sequence], new: list[int], page_size: int, kernel: int,
                 device: str) -> None:  # fmt: skip
        """`new` tokens each, the last ones of rows padded on the left to max(new); the pages are
        there already, `sequence.length` counts the tokens before. `kernel`: convolution taps."""
        width = max(new)
        rows, reads, stored, taps, heads = [], [], [], [], []
        start = 0  # of a sequence in the list of its old convolution inputs and its new tokens
        for b, (sequence, count) in enumerate(zip(sequences, new, strict=True)):
            before, after = sequence.length, sequence.length + count
            rows += range((b + 1) * width - count, (b + 1) * width)
            reads.append(sequence.pages[(before - 1) // page_size] if before else -1)
            heads += range(start, start + kernel - 1)
            taps += range(start, start + count)
            # The page rule: every page end that is reached, and the last page at the end.
            ends = {*range(-(-(before + 1) // page_size) * page_size, after + 1, page_size), after}
            stored += [(sequence.pages[(n - 1) // page_size], start + n - before) for n in ends]
            start += kernel - 1 + count

        def table(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        long, span = torch.int64, torch.arange(kernel, device=device)
        self.is_decode = width == 1
        self.rows = table(rows, long)  # [T] of the padded batch
        self.reads = table(reads, long)  # [N] page, -1: none
        self.heads = table(heads, long)  # [N (kernel - 1)] where old inputs go
        self.taps = table(taps, long)[:, None] + span  # [T, kernel] inputs of each token
        self.stored_pages = table([page for page, _ in stored], long)
        self.stored_taps = table([at for _, at in stored], long)[:, None] + span[:-1]
        counts = [len(s.pages) for s in sequences]
        self.table = {
            "page_indices": table([page for s in sequences for page in s.pages]),
            "page_indptr": table([sum(counts[:i]) for i in range(len(counts) + 1)]),
            "last_page_len": table([(s.length + n - 1) % page_size + 1
                                    for s, n in zip(sequences, new, strict=True)]),
        }  # fmt: skip
        if self.is_decode:
            self.table["slots"] = gdn_paged.gdn_paged_decode_slots(**self.table)
        else:
            cu_seqlens = table([sum(new[:i]) for i in range(len(new) + 1)])
            self.table |= {"cu_seqlens": cu_seqlens, "page_size": page_size}
            self.table["slots"] = gdn_paged.gdn_paged_prefill_slots(**self.table)


class PagedStates:
    """The pools of all gated delta net layers of a model, which it makes use them."""

    def __init__(self, model: nn.Module, num_pages: int, page_size: int) -> None:
        self.page_size, self.allocator = page_size, PageAllocator(num_pages)
        self.step: Step | None = None  # of the forward pass that runs
        self.layers = [m for m in model.modules() if hasattr(m, "A_log") and hasattr(m, "conv1d")]
        if not self.layers:
            raise ValueError("model: no gated delta net layer; expected Qwen3-Next or Qwen3.5")
        self.kernel = self.layers[0].conv_kernel_size
        for layer in self.layers:
            like = layer.conv1d.weight
            layer.states = torch.zeros(
                num_pages, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim,
                device=like.device,
            )  # fmt: skip
            layer.conv_inputs = like.new_zeros(num_pages, self.kernel - 1, like.shape[0])
            layer.forward = partial(paged_forward, layer, self)

    def begin(self, sequences: list[Sequence], new: list[int]) -> Step:
        """Pages and tables for `new` more tokens of each sequence."""
        for sequence, count in zip(sequences, new, strict=True):
            self.allocator.extend(sequence, sequence.length + count, self.page_size)
        device = self.layers[0].states.device
        self.step = Step(sequences, new, self.page_size, self.kernel, device)
        return self.step

    def remove(self) -> None:
        """Gives the layers their own forward back."""
        for layer in self.layers:
            del layer.forward, layer.states, layer.conv_inputs


def project(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convolution input [T, C], output gate z [T, H, V], logits b and a [T, H] of tokens [T, D]."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next: grouped by key head
        qkvz, ba = layer.in_proj_qkvz(x[None]), layer.in_proj_ba(x[None])
        q, k, v, z, b, a = (t.squeeze(0) for t in layer.fix_query_key_value_ordering(qkvz, ba))
        return torch.cat([t.flatten(1) for t in (q, k, v)], dim=-1), z, b, a
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.in_proj_qkv(x), z, layer.in_proj_b(x), layer.in_proj_a(x)


def convolve(layer: nn.Module, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Causal convolution and SiLU of tokens [T, C]; reads and writes the pages' inputs."""
    num_old = layer.conv_inputs.shape[1]
    inputs = x.new_empty(len(x) + len(step.heads), x.shape[1])
    inputs[step.taps[:, num_old]] = x
    old = layer.conv_inputs[step.reads.clamp(min=0)]
    inputs[step.heads] = torch.where(step.reads[:, None, None] < 0, 0, old).flatten(0, 1)
    layer.conv_inputs[step.stored_pages] = inputs[step.stored_taps]
    weight = layer.conv1d.weight.squeeze(1).t().float()  # [kernel, C]
    return nn.functional.silu((inputs[step.taps].float() * weight).sum(1)).to(x.dtype)


def paged_forward(layer: nn.Module, states: PagedStates, hidden_states: torch.Tensor,
                  **_: object) -> torch.Tensor:  # fmt: skip
    """The layer's forward on pages. Rows are padded on the left; only their tokens are computed."""
    step = states.step
    x = hidden_states.flatten(0, 1)[step.rows]
    qkv, z, b, a = project(layer, x)
    q, k, v = convolve(layer, qkv, step).split(
        [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1
    )
    q, k = (t.unflatten(-1, (-1, layer.head_k_dim)) for t in (q, k))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    if step.is_decode:
        q, k, v, a, b = (t.unsqueeze(1) for t in (q, k, v, a, b))
        y = gdn_paged.gated_delta_rule_decode_paged(
            q, k, v, layer.A_log, a, layer.dt_bias, b, state_pool=layer.states, **step.table
        ).squeeze(1)
    else:
        y = gdn_paged.chunk_gated_delta_rule_paged(
            q, k, v, a, b, state_pool=layer.states, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=layer.A_log, dt_bias=layer.dt_bias, beta_is_logit=True,
            **step.table,
        )  # fmt: skip
    y = layer.norm(y.flatten(0, 1), z.flatten(0, 1)).unflatten(0, z.shape[:2]).flatten(1)
    output = hidden_states.new_zeros(hidden_states.shape)
    output.flatten(0, 1)[step.rows] = layer.out_proj(y)
    return output
