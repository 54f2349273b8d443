"""Qwen3-Next and Qwen3.5 of Hugging Face transformers on paged states, with prefix reuse.

A small model with random weights (nothing is downloaded) answers requests that share a system
prompt. It runs three times: as Hugging Face wrote it; with its gated delta net layers on pages; and
on pages with the full pages of the system prompt taken from an earlier request. The full-attention
layers keep Hugging Face's own cache. All three must give the same logits and the same tokens.

    python examples/hf_qwen3_next.py [--device cuda] [--family qwen3_5]
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from dataclasses import dataclass, field

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # also no kernels from the hub

from hf_paged_states import PagedStates, Sequence
from transformers import DynamicCache, logging

logging.set_verbosity_error()  # that its faster kernels are not installed

FAMILIES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}
PAGE_SIZE = 64
VOCABULARY = 512
SYSTEM_TOKENS = 200  # three full pages and eight tokens
# Of the largest logit: how far any logit may lie from Hugging Face's. On the GPU that is how far
# its own bf16 logits lie from its fp32 ones.
TOLERANCE = {"cpu": 1e-4, "cuda": 6e-2}


def small_model(family: str, device: str) -> nn.Module:
    """Three gated delta net layers and one attention layer; fp32 on the CPU, bf16 on a GPU."""
    package = importlib.import_module(f"transformers.models.{family}")
    stem = FAMILIES[family]
    make_config = getattr(package, f"{stem}TextConfig", None) or getattr(package, f"{stem}Config")
    options = {} if family == "qwen3_5" else {
        # Dense: the choice of experts jumps with a rounding, and would hide what is compared.
        "mlp_only_layers": [0, 1, 2, 3],
        "num_experts": 0,
    }  # fmt: skip
    config = make_config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=256, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
        initializer_range=0.05, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(package, f"{stem}ForCausalLM")(config).eval()
    for module in model.modules():
        if hasattr(module, "dt_bias"):  # trained heads remember long, freshly made ones forget
            module.dt_bias.data.uniform_(-7, -3)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def requests(count: int = 4) -> list[list[int]]:
    """A shared system prompt and a question of its own each, of random tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SYSTEM_TOKENS + 40 * count,), generator=generator).tolist()
    system, rest = tokens[:SYSTEM_TOKENS], tokens[SYSTEM_TOKENS:]
    return [system + rest[40 * i : 40 * i + 25 + 5 * i] for i in range(count)]


@dataclass
class Prefix:
    """Full pages of an earlier request, and what attention layers know of the same tokens."""

    tokens: list[int]
    pages: list[int]
    keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer, [1, heads, tokens, D]


@dataclass
class Answer:
    tokens: torch.Tensor  # [requests, steps]
    logits: torch.Tensor  # [requests, steps, vocabulary] fp32
    prefilled: int  # prompt tokens that were computed
    seconds: dict[str, float] = field(default_factory=dict)


class Engine:
    """Greedy batched generation, with or without paged states."""

    def __init__(self, model: nn.Module, states: PagedStates | None = None) -> None:
        self.model, self.states = model, states
        self.device = next(model.parameters()).device
        self.prefix: Prefix | None = None

    def generate(self, prompts: list[list[int]], steps: int,
                 forced: torch.Tensor | None = None) -> Answer:  # fmt: skip
        """`steps` tokens for each prompt; `forced` [requests, steps] is fed instead of them."""
        cache = DynamicCache(config=self.model.config)
        sequences, done = [Sequence() for _ in prompts], 0
        if self.prefix and all(p[: len(self.prefix.tokens)] == self.prefix.tokens for p in prompts):
            done = self._start_from_prefix(sequences, cache)
        new = [p[done:] for p in prompts]
        # Rows end together: padding stands between the shared prefix and a shorter question.
        width = max(map(len, new))
        batch = torch.tensor([[0] * (width - len(p)) + p for p in new], device=self.device)
        mask = torch.tensor([[1] * done + [0] * (width - len(p)) + [1] * len(p) for p in new],
                            device=self.device)  # fmt: skip
        answer = Answer(batch.new_empty(len(new), steps), torch.empty(0), sum(map(len, new)))
        logits, start = [], self._now()
        for n in range(steps):
            lengths = [len(p) for p in new] if n == 0 else [1] * len(new)
            logits.append(self._forward(batch, mask, cache, sequences, lengths))
            answer.tokens[:, n] = logits[-1].argmax(-1)
            if n == 0:
                answer.seconds["prefill"] = self._now() - start
            batch = (answer.tokens if forced is None else forced)[:, n : n + 1]
            mask = torch.cat((mask, torch.ones_like(batch)), dim=1)
        answer.seconds["decode"] = self._now() - start - answer.seconds["prefill"]
        answer.logits = torch.stack(logits, dim=1)
        if self.states:
            self._remember(prompts[0], sequences[0], cache)
            for sequence in sequences:
                self.states.allocator.release(sequence)
        return answer

    def _forward(self, batch: torch.Tensor, mask: torch.Tensor, cache: DynamicCache,
                 sequences: list[Sequence], lengths: list[int]) -> torch.Tensor:  # fmt: skip
        """Logits [requests, vocabulary] after the last token of each row."""
        if self.states:
            self.states.begin(sequences, lengths)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -batch.shape[1] :]
        logits = self.model(
            input_ids=batch, attention_mask=mask, position_ids=positions, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip
        for sequence, count in zip(sequences, lengths, strict=True):
            sequence.length += count
        return logits[:, -1].float()

    def _start_from_prefix(self, sequences: list[Sequence], cache: DynamicCache) -> int:
        prefix, length = self.prefix, len(self.prefix.tokens)
        for sequence in sequences:
            sequence.pages = self.states.allocator.share(prefix.pages)
            sequence.length = length
        for layer, keys_values in prefix.keys_values.items():
            cache.update(*(x.expand(len(sequences), -1, -1, -1) for x in keys_values), layer)
        return length

    def _remember(self, prompt: list[int], sequence: Sequence, cache: DynamicCache) -> None:
        """Keeps the full pages of the system prompt; an engine has a tree of such prefixes."""
        if self.prefix:
            return
        count = SYSTEM_TOKENS // PAGE_SIZE
        length = count * PAGE_SIZE
        padding = cache.get_seq_length() - sequence.length  # on the left of row 0
        kinds = self.model.config.layer_types
        keys_values = {
            i: tuple(
                x[:1, :, padding : padding + length].clone() for x in (layer.keys, layer.values)
            )
            for i, layer in enumerate(cache.layers)
            if kinds[i] == "full_attention"
        }
        pages = self.states.allocator.share(sequence.pages[:count])
        self.prefix = Prefix(prompt[:length], pages, keys_values)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Comparison:
    """How `answer` differs from `expected`, both fed the same tokens."""

    error: float  # largest difference of a logit, over the largest logit
    differing_tokens: int
    gap: float  # how far apart the two candidates were where the token differs, likewise

    @classmethod
    def of(cls, answer: Answer, expected: Answer) -> Comparison:
        scale = expected.logits.abs().max()
        differ = answer.tokens != expected.tokens
        chosen, best = (expected.logits.gather(-1, x.tokens[..., None])[..., 0][differ]
                        for x in (answer, expected))  # fmt: skip
        gap = ((best - chosen).max() / scale).item() if differ.any() else 0.0
        error = (answer.logits - expected.logits).abs().max() / scale
        return cls(error.item(), int(differ.sum()), gap)


@torch.inference_mode()
def run(family: str, device: str, steps: int = 40) -> dict[str, tuple[Answer, Comparison]]:
    """By name of the run: what it answered, and how that compares with Hugging Face's answer.

    In bf16 two tokens may be too close to tell: there every run is fed Hugging Face's tokens."""
    model, prompts = small_model(family, device), requests()
    expected = Engine(model).generate(prompts, steps)
    results = {"Hugging Face": (expected, Comparison.of(expected, expected))}
    states = PagedStates(model, num_pages=64, page_size=PAGE_SIZE)
    engine = Engine(model, states)
    for name in ("paged", "paged, prefix reused"):  # the first run leaves the prefix behind
        answer = engine.generate(prompts, steps, None if device == "cpu" else expected.tokens)
        results[name] = answer, Comparison.of(answer, expected)
    states.remove()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--family", choices=FAMILIES, help="default: both")
    options = parser.parse_args()
    tolerance = TOLERANCE[options.device]
    for family in [options.family] if options.family else FAMILIES:
        print(f"{family} on {options.device}")
        for name, (answer, comparison) in run(family, options.device).items():
            decoded = answer.tokens.numel() - len(answer.tokens)
            print(
                f"  {name:<22} prefill {answer.prefilled:>4} tokens,"
                f" {answer.prefilled / answer.seconds['prefill']:>7.0f} tokens/s;"
                f" decode {decoded / answer.seconds['decode']:>6.0f} tokens/s;"
                f" logits differ by {comparison.error:.1e}, {comparison.differing_tokens} tokens"
            )
            assert comparison.error <= tolerance and comparison.gap <= tolerance
            assert comparison.differing_tokens == 0 or options.device == "cuda"


if __name__ == "__main__":
    main()
