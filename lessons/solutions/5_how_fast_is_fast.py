"""A solution of lesson 5's exercise: FLOPs, MFU, the roofline, and the plan of a run."""


def training_flops(n, n_layers, width, seq_len, attention="full", frozen=False, recompute=False):
    """FLOPs of training on one token."""
    # Everything follows from the forward. A weight costs 2 FLOPs forward, 2 for the gradient of its
    # input and 2 for its own gradient, which a frozen weight does not need. The two products of
    # attention have no weights: their backward is twice their forward, always.
    scores = {"none": 0, "causal": 2, "full": 4}[attention] * n_layers * width * seq_len
    forward = 2 * n + scores
    backward = (2 if frozen else 4) * n + 2 * scores
    return forward + backward + (forward if recompute else 0)


def mfu(flops_per_token, tokens_per_second, devices, peak_flops):
    """The share of the peak, 0 to 1. tokens_per_second: of all devices. peak_flops: of one."""
    # what is done in a second over what could be done in a second
    return flops_per_token * tokens_per_second / (devices * peak_flops)


def matmul_intensity(m, k, n, bytes_per_number):
    """FLOPs per byte of a product (m, k) x (k, n), each matrix read or written once."""
    return 2 * m * k * n / (bytes_per_number * (m * k + k * n + m * n))


def attainable(intensity, peak_flops, bandwidth):
    """The most FLOP/s at so many FLOPs per byte. bandwidth: bytes/s."""
    return min(peak_flops, intensity * bandwidth)


def palm_540b(tokens_per_second=238.3e3):
    """PaLM 540B (arXiv 2204.02311, appendix B), attention counted in full, no recomputation."""
    # PaLM's heads together are 48 x 256 = 12288 wide: less than its d_model of 18432.
    per_token = training_flops(540.35e9, 118, 48 * 256, 2048)
    return mfu(per_token, tokens_per_second, 6144, 275e12)


def mpt_1b(tokens_per_second=20_513):
    """MPT-1B (LLM Foundry's table): 6 N + 12 L d S."""
    # The table has tokens/s of one GPU, so one device's peak belongs to it.
    per_token = training_flops(1_315_950_592, 24, 2048, 2048)
    return mfu(per_token, tokens_per_second, 1, 312e12)


def gpt_175b(seconds=13.75):
    """A GPT of 175B in Megatron-LM (arXiv 2205.05198, tables 3 and 5), its MFU."""
    # Megatron's count is the same formula with another N: only what is in a product.
    # 72 B S L d^2 (1 + S / 6d + V / 12Ld), as the paper writes it, is 6 N + 12 L d S of each token
    # with N = 12 L d^2 + V d.
    n_layers, d_model, vocab_size, seq_len = 96, 12288, 51200, 2048
    n = 12 * n_layers * d_model**2 + vocab_size * d_model
    per_token = training_flops(n, n_layers, d_model, seq_len)
    return mfu(per_token, 64 * seq_len / seconds, 64, 312e12)


MODELS = {  # parameters, layers, d_model
    "mpt-1b": (1_315_950_592, 24, 2048),
    "mpt-3b": (2_651_837_440, 32, 2560),
    "mpt-7b": (6_658_859_008, 32, 4096),
}
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


def plan():
    """The plan, as a dictionary."""
    plans = [plan_of(name) for name in MODELS]
    paid_for = [plan for plan in plans if plan["dollars"] <= DOLLARS]
    return max(paid_for, key=lambda plan: MODELS[plan["model"]][0])
