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
    raise NotImplementedError("training_flops")


def mfu(flops_per_token: float, tokens_per_second: float, devices: int, peak_flops: float) -> float:
    """The share of the peak, 0 to 1. tokens_per_second: of all devices. peak_flops: of one."""
    raise NotImplementedError("mfu")


def matmul_intensity(m: int, k: int, n: int, bytes_per_number: int) -> float:
    """FLOPs per byte of a product (m, k) x (k, n), each matrix read or written once."""
    raise NotImplementedError("matmul_intensity")


def attainable(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The most FLOP/s at so many FLOPs per byte. bandwidth: bytes/s."""
    raise NotImplementedError("attainable")


# Three published MFUs, each a share from 0 to 1, right to 0.0005. Compute them from these numbers.


def palm_540b(tokens_per_second: float = 238.3e3) -> float:
    """PaLM 540B (arXiv 2204.02311, appendix B), attention counted in full, no recomputation.

    540.35e9 parameters, 118 layers, d_model 18432, 48 heads of width 256, sequences of 2048 tokens.
    tokens_per_second: of all 6144 TPU v4, 275e12 FLOP/s each.
    """
    raise NotImplementedError("palm_540b")


def mpt_1b(tokens_per_second: float = 20_513) -> float:
    """MPT-1B (LLM Foundry's table): 6 N + 12 L d S.

    1,315,950,592 parameters, 24 layers, d_model 2048, sequences of 2048 tokens; on 8 A100, 312e12
    FLOP/s each. tokens_per_second: of *one GPU*.
    """
    raise NotImplementedError("mpt_1b")


def gpt_175b(seconds: float = 13.75) -> float:
    """A GPT of 175B in Megatron-LM (arXiv 2205.05198, tables 3 and 5), its MFU.

    96 layers, d_model 12288, a vocabulary of 51200, sequences of 2048 tokens. seconds: of
    a step of 64 sequences on 64 A100 (312e12 FLOP/s). It recomputes attention, which MFU does not
    count. The paper counts products only: 12 d_model^2 weights in each layer, and those of the
    logits; attention in full.
    """
    raise NotImplementedError("gpt_175b")


# A plan. You have one node of 4 MI250 cards, which are 8 torch devices of 181.05e12 FLOP/s, and
# 3,000 dollars. A card costs 1.50 dollars an hour. Training reaches an MFU of 45.8 %, as MosaicML's
# did there (attention in full). Which is the largest of these models that you can train on 20
# tokens a parameter, in sequences of 2048 tokens?
MODELS = {  # parameters, layers, d_model
    "mpt-1b": (1_315_950_592, 24, 2048),
    "mpt-3b": (2_651_837_440, 32, 2560),
    "mpt-7b": (6_658_859_008, 32, 4096),
}


def plan() -> dict:
    """The plan, as a dictionary.

    "model"              a key of MODELS
    "tokens_per_second"  of the node
    "tokens"             of the run: 20 for each parameter
    "days", "dollars"    of the run
    """
    raise NotImplementedError("plan")
