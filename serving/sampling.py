"""Sampling: draw the next token from a model's logits.

    p = softmax(logits / temperature);  token = the first at which p_0 + p_1 + ... exceeds u,  u uniform in [0, 1)

temperature 0 takes the likeliest token. top_k keeps the k likeliest; of these top_p keeps the fewest that together have
probability p (nucleus sampling: Holtzman et al., 2020), in this order, as transformers does. Each text has numbers u of
its own, decided by its seed alone: what it says does not depend on the texts that are written beside it.

Run `python -m serving.sampling` to see what the cuts leave of a distribution.
Read next: serving/decoder.py.
"""

import torch

from program import arguments, run


def uniforms(seed: int, n: int) -> torch.Tensor:
    """The n numbers in [0, 1) that one text is drawn with, (n,) fp32. More of them begin with the same ones."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, uniform=None):
    """Draw one token for each row of logits (B, V), fp32. Returns (B,) int64.

    uniform: (B,) in [0, 1), or None for torch's generator; top_k=0: no limit.
    """
    if temperature < 1e-6:  # 0, or so small that fp32 cannot divide by it
        return logits.argmax(dim=-1)
    tokens, vocab_size = None, logits.shape[-1]
    if 0 < top_k < vocab_size or top_p < 1:
        logits, tokens = logits.topk(min(top_k or vocab_size, vocab_size))  # likeliest first
    probs = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        before = (
            probs.cumsum(dim=-1) - probs
        )  # the probability of all likelier tokens: 0 for the first, which stays
        cut = before >= top_p
        cut[:, 0] = False  # also where top_p is so small that fp32 makes it 0
        probs = probs.masked_fill(cut, 0)
    if uniform is None:
        uniform = torch.rand(len(probs), device=probs.device)
    reached = probs.cumsum(dim=-1)
    wanted = uniform[:, None] * reached[:, -1:] * (1 - 1e-6)  # rounding must not reach the end
    choice = (reached <= wanted).sum(dim=-1)
    return choice if tokens is None else tokens.gather(-1, choice[:, None])[:, 0]


def demonstrate(argv) -> None:
    """What 100,000 draws give for six tokens."""
    arguments(argv)
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    logits = probs.log().repeat(100_000, 1)
    cuts = (
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 4, "top_p": 0.8},
        {"temperature": 0},
    )
    print("the model's", *(f"{p:.2f}" for p in probs.tolist()))
    for how in cuts:
        drawn = sample(logits, **how, uniform=uniforms(1, len(logits)))
        shares = (torch.bincount(drawn, minlength=6) / len(drawn)).tolist()
        print(
            " ".join(f"{share:.2f}" for share in shares),
            *(f"{name}={value}" for name, value in how.items()),
        )


if __name__ == "__main__":
    run(demonstrate)
