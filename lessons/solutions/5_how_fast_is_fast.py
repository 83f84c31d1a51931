"""Lesson 5. FLOPs, MFU, the roofline, and the plan of a run.

Complete the functions below, from top to bottom. `python -m lessons check 5` compares them with
counts by hand and with published runs. Lesson 5 has all formulas. Import nothing of the project.
"""


def training_flops(n, n_layers, width, seq_len, attention="full", frozen=False, recompute=False):
    """FLOPs of training on one token.

    n: parameters that take part in products (the lesson's N). width: of all heads together (its d).
    attention: "full" counts all S x S scores, "causal" half of them, "none" no attention.
    frozen: the n weights need no gradient of their own. Attention costs as much as ever.
    recompute: one more forward, as HFU counts it: 2 n, and a third of the attention term. 4/3 holds
    only if nothing is frozen.
    """
    # --- in the stub: raise NotImplementedError("training_flops")
    # Everything follows from the forward. A weight costs 2 FLOPs forward, 2 for the gradient of its
    # input and 2 for its own gradient, which a frozen weight does not need. The two products of
    # attention have no weights: their backward is twice their forward, always.
    scores = {"none": 0, "causal": 2, "full": 4}[attention] * n_layers * width * seq_len
    forward = 2 * n + scores
    backward = (2 if frozen else 4) * n + 2 * scores
    return forward + backward + (forward if recompute else 0)
    # ---


def mfu(flops_per_token: float, tokens_per_second: float, devices: int, peak_flops: float) -> float:
    """The share of the peak, 0 to 1. tokens_per_second: of all devices. peak_flops: of one."""
    # --- in the stub: raise NotImplementedError("mfu")
    # what is done in a second over what could be done in a second
    return flops_per_token * tokens_per_second / (devices * peak_flops)
    # ---


def matmul_intensity(m: int, k: int, n: int, bytes_per_number: int) -> float:
    """FLOPs per byte of a product (m, k) x (k, n), each matrix read or written once."""
    # --- in the stub: raise NotImplementedError("matmul_intensity")
    return 2 * m * k * n / (bytes_per_number * (m * k + k * n + m * n))
    # ---


def attainable(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The most FLOP/s at so many FLOPs per byte. bandwidth: bytes/s."""
    # --- in the stub: raise NotImplementedError("attainable")
    return min(peak_flops, intensity * bandwidth)
    # ---


# Three published MFUs, each a share from 0 to 1, right to 0.0005. Compute them from these numbers.


def palm_540b(tokens_per_second: float = 238.3e3) -> float:
    """PaLM 540B (arXiv 2204.02311, appendix B), attention counted in full, no recomputation.

    540.35e9 parameters, 118 layers, d_model 18432, 48 heads of width 256, sequences of 2048 tokens.
    tokens_per_second: of all 6144 TPU v4, 275e12 FLOP/s each.
    """
    # --- in the stub: raise NotImplementedError("palm_540b")
    # PaLM's heads together are 48 x 256 = 12288 wide: less than its d_model of 18432.
    per_token = training_flops(540.35e9, 118, 48 * 256, 2048)
    return mfu(per_token, tokens_per_second, 6144, 275e12)
    # ---


def mpt_1b(tokens_per_second: float = 20_513) -> float:
    """MPT-1B (LLM Foundry's table): 6 N + 12 L d S.

    1,315,950,592 parameters, 24 layers, d_model 2048, sequences of 2048 tokens; on 8 A100, 312e12
    FLOP/s each. tokens_per_second: of *one GPU*.
    """
    # --- in the stub: raise NotImplementedError("mpt_1b")
    # The table has tokens/s of one GPU, so one device's peak belongs to it.
    per_token = training_flops(1_315_950_592, 24, 2048, 2048)
    return mfu(per_token, tokens_per_second, 1, 312e12)
    # ---


def gpt_175b(seconds: float = 13.75) -> float:
    """A GPT of 175B in Megatron-LM (arXiv 2205.05198, tables 3 and 5), its MFU.

    96 layers, d_model 12288, a vocabulary of 51200, sequences of 2048 tokens. seconds: of
    a step of 64 sequences on 64 A100 (312e12 FLOP/s). It recomputes attention, which MFU does not
    count. The paper counts products only: 12 d_model^2 weights in each layer, and those of the
    logits; attention in full.
    """
    # --- in the stub: raise NotImplementedError("gpt_175b")
    # Megatron's count is the same formula with another N: only what is in a product.
    # 72 B S L d^2 (1 + S / 6d + V / 12Ld), as the paper writes it, is 6 N + 12 L d S of each token
    # with N = 12 L d^2 + V d.
    n_layers, d_model, vocab_size, seq_len = 96, 12288, 51200, 2048
    n = 12 * n_layers * d_model**2 + vocab_size * d_model
    per_token = training_flops(n, n_layers, d_model, seq_len)
    return mfu(per_token, 64 * seq_len / seconds, 64, 312e12)
    # ---


# A plan. You have one node of 4 MI250 cards, which are 8 torch devices of 181.05e12 FLOP/s, and
# 3,000 dollars. A card costs 1.50 dollars an hour. Training reaches an MFU of 45.8 %, as MosaicML's
# did there (attention in full). Which is the largest of these models that you can train on 20
# tokens a parameter, in sequences of 2048 tokens?
MODELS = {  # parameters, layers, d_model
    "mpt-1b": (1_315_950_592, 24, 2048),
    "mpt-3b": (2_651_837_440, 32, 2560),
    "mpt-7b": (6_658_859_008, 32, 4096),
}


# --- in the stub:
DEVICES, CARDS, PRICE, DOLLARS = 8, 4, 1.50, 3000


def plan_of(name: str) -> dict:
    """The plan of one model. The price is of a card, of which there are half as many as devices."""
    n, n_layers, d_model = MODELS[name]
    speed = 0.458 * DEVICES * 181.05e12 / training_flops(n, n_layers, d_model, 2048)
    tokens = 20 * n
    days = tokens / speed / 86_400
    return {
        "model": name,
        "tokens_per_second": speed,
        "tokens": tokens,
        "days": days,
        "dollars": days * 24 * CARDS * PRICE,
    }


# ---


def plan() -> dict:
    """The plan, as a dictionary.

    "model"              a key of MODELS
    "tokens_per_second"  of the node
    "tokens"             of the run: 20 for each parameter
    "days", "dollars"    of the run
    """
    # --- in the stub: raise NotImplementedError("plan")
    plans = [plan_of(name) for name in MODELS]
    paid_for = [plan for plan in plans if plan["dollars"] <= DOLLARS]
    return max(paid_for, key=lambda plan: MODELS[plan["model"]][0])
    # ---
