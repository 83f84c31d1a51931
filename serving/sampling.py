"""Sampling: draw the next token from a model's logits.

    p = softmax(logits / temperature)
    token = the first i with p_0 + p_1 + ... + p_i > u      u is uniform in [0, 1)

Temperature 0 is greedy: it takes the likeliest token. top_k keeps the k likeliest tokens. Of these,
top_p keeps the smallest set of likeliest tokens whose probability is at least p (nucleus sampling:
Holtzman et al., 2020). This is the order in which transformers applies them.

Each text has its own numbers u, of the seed, its prompt and how often that came before. So prompts
are drawn independently, and a text does not depend on the others, their order or its batch.

Run `python -m serving.sampling` to see what temperature, top_k and top_p make of a distribution.
"""

import math
from dataclasses import dataclass

import torch

from model import seeded
from program import arguments, require, run


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are drawn. UserError for values out of range."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # draw from this many of the likeliest tokens (0 = no limit)
    top_p: float = 1.0  # and from the fewest of them that have this probability (0: one)

    def __post_init__(self):
        has_temperature = 0 <= self.temperature < math.inf
        in_range = has_temperature and self.top_k >= 0 and 0 <= self.top_p <= 1
        require(in_range, "temperature, top_k must be 0 or more, top_p in [0, 1]")


def uniforms(seed: int, prompt: list[int], repeat: int, n: int) -> torch.Tensor:
    """The n numbers in [0, 1) that draw the tokens of one text, (n,) fp32.

    prompt: its ids. repeat: which text of this prompt it is, 0 for the first. A larger n appends
    numbers and does not change the first ones.
    """
    return torch.rand(n, generator=seeded(seed, f"{repeat}:{prompt}"))


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, uniform=None):
    """Draw one token for each row of logits (B, V) fp32. Returns (B,) int64.

    top_k: 0 means no limit. uniform: (B,) in [0, 1); None draws from torch's generator.
    """
    if temperature < 1e-6:  # 0, or so small that fp32 cannot divide by it
        return logits.argmax(dim=-1)

    vocab_size = logits.shape[-1]
    candidates = None  # (B, k) token ids, likeliest first; None: all, in the order of the logits
    if 0 < top_k < vocab_size or top_p < 1:
        logits, candidates = logits.topk(min(top_k or vocab_size, vocab_size))

    probs = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        probs = cut_nucleus(probs, top_p)

    if uniform is None:
        uniform = torch.rand(len(probs), device=probs.device)
    cumulative = probs.cumsum(dim=-1)
    # Scaled to the sum of what is kept. Rounding must not carry it past the last kept token.
    threshold = uniform[:, None] * cumulative[:, -1:] * (1 - 1e-6)
    choice = (cumulative <= threshold).sum(dim=-1)

    if candidates is None:
        return choice
    return candidates.gather(-1, choice[:, None])[:, 0]


def cut_nucleus(probs, top_p: float):
    """Set the probability of each token outside of the nucleus to 0.

    probs: (B, k), likeliest first. A token stays if the likelier ones together have less than
    `top_p`. The first token always stays, even where fp32 rounds `top_p` to 0.
    """
    likelier = probs.cumsum(dim=-1) - probs  # the probability of all likelier tokens
    outside = likelier >= top_p
    outside[:, 0] = False
    return probs.masked_fill(outside, 0)


def demonstrate(argv) -> None:
    """Print the shares of six tokens among 100,000 draws, for several settings."""
    arguments(argv)
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    logits = probs.log().repeat(100_000, 1)
    examples = (
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 4, "top_p": 0.8},
        {"temperature": 0},
    )

    print("the model's", *(f"{p:.2f}" for p in probs.tolist()))
    for settings in examples:
        tokens = sample(logits, **settings, uniform=uniforms(1, [], 0, len(logits)))
        shares = torch.bincount(tokens, minlength=6) / len(tokens)
        row = " ".join(f"{share:.2f}" for share in shares.tolist())
        print(row, *(f"{name}={value}" for name, value in settings.items()))


if __name__ == "__main__":
    run(demonstrate)
