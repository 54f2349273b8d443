"""A script written for FlashInfer's gdn_paged, run here after one import line was swapped.

A prompt of 2500 tokens whose first 2048 are cached: pages 7 and 3 are shared with an earlier
request, page 12 is new. Prefill of the 452 new tokens, then one decoded token.

    python examples/from_flashinfer.py [cpu | cuda]
"""

import sys

import torch

import gdn_paged as flashinfer  # was: import flashinfer

device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens, heads_qk, heads_v, dim = 2500, 2, 4, 128


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device)


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


prompt = {
    "q": unit(draw(tokens, heads_qk, dim)).bfloat16(),
    "k": unit(draw(tokens, heads_qk, dim)).bfloat16(),
    "v": draw(tokens, heads_v, dim).bfloat16(),
    "g": torch.sigmoid(draw(tokens, heads_v)) ** (1 / 16),
    "beta": torch.sigmoid(draw(tokens, heads_v)),
}
pool = torch.zeros(16, heads_v, dim, dim, device=device)

# The earlier request: its first 2048 tokens leave their states in pages 7 and 3.
flashinfer.chunk_gated_delta_rule_paged(
    *(x[:2048] for x in prompt.values()),
    cu_seqlens=torch.tensor([0, 2048], dtype=torch.int32, device=device),
    state_pool=pool,
    page_indices=torch.tensor([7, 3], dtype=torch.int32, device=device),
    page_indptr=torch.tensor([0, 2], dtype=torch.int32, device=device),
    page_size=1024,
    last_page_len=torch.tensor([1024], dtype=torch.int32, device=device),
)
before = pool.clone()

q, k, v, g, beta = (x[2048:] for x in prompt.values())
out = flashinfer.chunk_gated_delta_rule_paged(
    q, k, v, g, beta,  # the 452 new tokens
    cu_seqlens=torch.tensor([0, 452], dtype=torch.int32, device=device),
    state_pool=pool,  # [num_pages, H, 128, 128]
    page_indices=torch.tensor([7, 3, 12], dtype=torch.int32, device=device),
    page_indptr=torch.tensor([0, 3], dtype=torch.int32, device=device),
    page_size=1024,
    last_page_len=torch.tensor([452], dtype=torch.int32, device=device),
)  # fmt: skip
after_prefill = pool.clone()
changed = [page for page in range(16) if not torch.equal(pool[page], before[page])]
print("prefill wrote pages", changed)
assert changed == [12]  # pages 7 and 3 are shared and stay as they are

q, k, v = draw(1, 1, heads_qk, dim), draw(1, 1, heads_qk, dim), draw(1, 1, heads_v, dim)
q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
A_log, a, dt_bias, b = draw(heads_v), draw(1, 1, heads_v), draw(heads_v), draw(1, 1, heads_v)
decoded = flashinfer.gated_delta_rule_decode_paged(
    q, k, v, A_log, a, dt_bias, b,
    state_pool=pool,
    page_indices=torch.tensor([7, 3, 12], dtype=torch.int32, device=device),
    page_indptr=torch.tensor([0, 3], dtype=torch.int32, device=device),
    last_page_len=torch.tensor([453], dtype=torch.int32, device=device),
)  # fmt: skip
assert not torch.equal(pool[12], after_prefill[12])
print("decoded", tuple(decoded.shape), "on", decoded.device)
