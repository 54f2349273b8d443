"""A fixed-seed stack of gated-delta-net layers over bytes, on NumPy or on torch with CUDA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import gdn_paged

TILE = 64  # rows of one projection product; see Model.project


@dataclass(frozen=True)
class Config:
    """Sizes of the stack. Every layer holds one state ``[num_v_heads, head_dim, head_dim]``."""

    width: int = 256
    num_layers: int = 4
    num_q_heads: int = 2
    num_v_heads: int = 4
    head_dim: int = 64
    seed: int = 7

    @property
    def key_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.num_v_heads * self.head_dim

    @property
    def splits(self) -> list[int]:
        """Ends of q, k, v, output gate, a and b in the columns of the input projection."""
        widths = [self.key_width, self.key_width, self.value_width, self.value_width]
        return list(np.cumsum([*widths, self.num_v_heads, self.num_v_heads]))


@dataclass
class Batch:
    """The new tokens of one step and the page table that holds them, all NumPy.

    ``cu_seqlens`` is None for a decode step (one token per sequence). ``tile_rows[t]`` is the row
    of token t once every sequence is padded to whole tiles, ``num_tiles`` their number.
    """

    tokens: np.ndarray  # uint8 [num_tokens]
    page_indices: np.ndarray  # int32 [num_indices]
    page_indptr: np.ndarray  # int32 [num_seqs + 1]
    last_page_len: np.ndarray  # int32 [num_seqs]
    cu_seqlens: np.ndarray | None = None  # int32 [num_seqs + 1]
    tile_rows: np.ndarray | None = None
    num_tiles: int = 0


class Model:
    """Embedding, ``num_layers`` x (norm, projections, gated delta rule, gated norm), tied head."""

    def __init__(self, config: Config, page_size: int, num_pages: int, device: str = "cpu") -> None:
        self.config = config
        self.page_size = page_size
        self.on_gpu = device != "cpu"
        if self.on_gpu:
            import torch

            self._torch, self._device = torch, device
        rng = np.random.default_rng(config.seed)
        self.embedding = self._weight(rng.standard_normal((256, config.width)))
        self.layers = [self._layer(rng) for _ in range(config.num_layers)]
        shape = (num_pages, config.num_v_heads, config.head_dim, config.head_dim)
        self.pools = [self._pool(shape) for _ in self.layers]
        self.rows: dict[str, str] = {}  # which kernel row serves each call, in words

    def _weight(self, values: np.ndarray, *, keep_float32: bool = False) -> Any:
        if not self.on_gpu:
            return values.astype(np.float32)
        dtype = self._torch.float32 if keep_float32 else self._torch.bfloat16
        return self._torch.from_numpy(values).to(self._device, dtype)

    def _pool(self, shape: tuple[int, ...]) -> Any:
        if self.on_gpu:
            return self._torch.zeros(shape, dtype=self._torch.float32, device=self._device)
        return np.zeros(shape, np.float32)

    def _layer(self, rng: np.random.Generator) -> dict[str, Any]:
        c = self.config
        w_in = rng.standard_normal((c.width, c.splits[-1])) / math.sqrt(c.width)
        w_out = rng.standard_normal((c.value_width, c.width)) / math.sqrt(c.value_width)
        # Decay per head between slow and fast, time step 0.001 .. 0.1 before the gate's input.
        step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), c.num_v_heads))
        return {
            "w_in": self._weight(w_in),
            "w_out": self._weight(w_out),
            "A_log": self._weight(np.log(rng.uniform(1, 16, c.num_v_heads)), keep_float32=True),
            "dt_bias": self._weight(step + np.log(-np.expm1(-step)), keep_float32=True),
        }

    def _table(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array).to(self._device) if self.on_gpu else array

    def project(self, x: Any, weight: Any, batch: Batch) -> Any:
        """``x @ weight``, row for row the same bytes whatever else is in the batch (CPU).

        A BLAS picks its kernel by the shape of the product, so one product over the whole batch
        would round a token differently from batch to batch. Equal tiles at fixed positions of
        the sequence keep both runs of the demo comparable to the last bit.
        """
        if self.on_gpu:
            return x @ weight
        if batch.tile_rows is None:
            return (x[:, None, :] @ weight)[:, 0]
        tiles = np.zeros((batch.num_tiles * TILE, x.shape[1]), x.dtype)
        tiles[batch.tile_rows] = x
        product = tiles.reshape(batch.num_tiles, TILE, -1) @ weight
        return product.reshape(batch.num_tiles * TILE, -1)[batch.tile_rows]

    def _norm(self, x: Any) -> Any:
        if self.on_gpu:
            return self._torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(1e-6))

    def _gated(self, y: Any, gate: Any) -> Any:
        if self.on_gpu:
            return self._norm(y) * self._torch.nn.functional.silu(gate)
        return self._norm(y) * gate / (1 + np.exp(-gate))

    def forward(self, batch: Batch) -> Any:
        """Runs the new tokens through all layers, updating the pools.

        Returns:
            Hidden states ``[num_tokens, width]`` before the head.
        """
        c = self.config
        table = {
            "page_indices": self._table(batch.page_indices),
            "page_indptr": self._table(batch.page_indptr),
            "last_page_len": self._table(batch.last_page_len),
        }
        # The slots depend on the batch, not on the layer: once per step.
        if batch.cu_seqlens is None:
            table["slots"] = gdn_paged.gdn_paged_decode_slots(**table)
        else:
            table["cu_seqlens"] = self._table(batch.cu_seqlens)
            table["page_size"] = self.page_size
            table["slots"] = gdn_paged.gdn_paged_prefill_slots(**table)
        x = self.embedding[self._table(batch.tokens.astype(np.int64))]
        for layer, pool in zip(self.layers, self.pools, strict=True):
            columns = self.project(self._norm(x), layer["w_in"], batch)
            s = c.splits
            tokens = (-1,) if batch.cu_seqlens is not None else (len(x), 1)
            q = columns[:, : s[0]].reshape(*tokens, c.num_q_heads, c.head_dim)
            k = columns[:, s[0] : s[1]].reshape(*tokens, c.num_q_heads, c.head_dim)
            v = columns[:, s[1] : s[2]].reshape(*tokens, c.num_v_heads, c.head_dim)
            gate = columns[:, s[2] : s[3]].reshape(-1, c.num_v_heads, c.head_dim)
            a = columns[:, s[3] : s[4]].reshape(*tokens, c.num_v_heads)
            b = columns[:, s[4] : s[5]].reshape(*tokens, c.num_v_heads)
            y = self._delta_rule(layer, pool, table, (q, k, v, a, b))
            y = self._gated(y.reshape(-1, c.num_v_heads, c.head_dim), gate)
            x = x + self.project(y.reshape(-1, c.value_width), layer["w_out"], batch)
        return x

    def _delta_rule(self, layer: dict[str, Any], pool: Any, table: dict[str, Any], x: Any) -> Any:
        q, k, v, a, b = x
        call: Any
        arguments = {"q": q, "k": k, "v": v, "state_pool": pool, **table}
        arguments |= {"A_log": layer["A_log"], "dt_bias": layer["dt_bias"]}
        if "cu_seqlens" not in table:
            call = gdn_paged.gated_delta_rule_decode_paged
            arguments |= {"a": a, "b": b}
        else:
            call = gdn_paged.chunk_gated_delta_rule_paged
            arguments |= {"g": a, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
            arguments |= {"beta": b, "beta_is_logit": True}
        if call.__name__ not in self.rows:
            self.rows[call.__name__] = gdn_paged.explain(call, **arguments)
        return call(**arguments)

    def logits(self, hidden: Any) -> np.ndarray:
        """Next-byte scores ``[rows, 256]`` of hidden states ``[rows, width]``, on the host."""
        if self.on_gpu:
            return (self._norm(hidden) @ self.embedding.T).float().cpu().numpy()
        return (self._norm(hidden)[:, None, :] @ self.embedding.T)[:, 0]
