"""One wrong answer for each part of each exercise: a replacement in the lesson's solution.

WRONG[number of the lesson] = [(part, words of the message, old, new), ...]. The part must refuse
what comes of it, and its message must have these words in it.
"""

WRONG = {
    "0": [
        ("prediction", "0.02 learns", "DIVERGES = 2e-1", "DIVERGES = 2e-2"),
        ("losses", "you wrote 33.6", "2e-3: 6.36", "2e-3: 33.6"),
        ("losses_of_a_file", "KeyError", 'if "loss" in row', "if row"),
    ],
    "1": [
        (
            "slopes",
            "alibi_slopes(3, bias_max=8): expected 0.25",
            "n = 2 ** (n_heads - 1).bit_length()",
            "n = n_heads",
        ),
        ("slopes", "n = n_heads / 0", "n = 2 ** (n_heads - 1).bit_length()", "n = n_heads / 0"),
        ("slopes", "the answer has no alibi_slopes", "def alibi_slopes(", "def slopes("),
        ("slopes", "SystemExit: 3", "n = 2 ** (n_heads - 1)", "raise SystemExit(3)  # "),
        (  # of torch: the part is written
            "slopes",
            "NotImplementedError",
            "n = 2 ** (n_heads - 1).bit_length()",
            "torch.softmax(torch.ones(2, dtype=torch.int64), -1)",
        ),
        ("attention", "before the softmax", "(j > i, -math.inf)", "(j < 0, -math.inf)"),
        (
            "attention_on_a_cache",
            "last Tq of the Tk",
            "i = torch.arange(Tk - Tq, Tk)",
            "i = torch.arange(Tq)",
        ),
        ("logits", "the logits of 3 layers", "h * bias_max / n)", "h * 8 / n_heads)"),
        ("count", "as many as wte has", "return embeddings +", "return 2 * embeddings +"),
    ],
    "2": [
        (
            "one_chunk",
            "expected 8.804614, but got 2.201153",
            "return loss,",
            "return loss / len(labels),",
        ),
        ("several_chunks", "+= and not =", "grad_weight += grad.T @ x", "grad_weight = grad.T @ x"),
        ("ignored_labels", "labels [5, -100, 2, 2]: expected 0", "grad *= counts", "grad *= 1"),
        (
            "large_logits",
            "but got inf",
            "log_z = logits.logsumexp(-1, keepdim=True)",
            "log_z = logits.exp().sum(-1, keepdim=True).log()",
        ),
        (
            "memory",
            "The logits of all tokens take 16.8 MB",
            "for begin in",
            "everything = hidden @ weight.T\n    for begin in",
        ),
        ("bugs", "B is not 'mean of means'", '"B": "decay without rate"', '"B": "mean of means"'),
    ],
    "3": [
        ("shard", "`clone()` copies it", "[dist.get_rank()].clone()", "[dist.get_rank()]"),
        ("gather", "gather on rank", "[:n].view(shape)", "[:n].flip(0).view(shape)"),
        (
            "same_rows",
            "reduce-scatter adds",
            "reduce_scatter(padded(dW)) / dist.get_world_size()",
            "reduce_scatter(padded(dW))",
        ),
        ("different_rows", "all-reduce it", "dist.all_reduce(loss)", "loss *= 2"),
        ("odd_sizes", "padded", "(0, -len(flat) % dist.get_world_size())", "(0, 0)"),
    ],
    "4": [
        ("max_and_sum", "both need the factor", "l = l * np.exp(m - finite) +", "l = l +"),
        ("attention", "both need the factor", "o = o * factor[:, None] + p @", "o = o + p @"),
        ("kernel", "both need the factor", "o * factor[:, None] + product", "o + product"),
    ],
    "5": [
        ("training_flops", "'frozen': True", "(2 if frozen else 4)", "4"),
        ("mfu", "2 devices", "(devices * peak_flops)", "peak_flops"),
        (
            "roofline",
            "m=1, k=1, n=1, bytes_per_number=2: expected 0.3333333",
            "(m * k + k * n + m * n)",
            "(m * k + k * n)",
        ),
        ("published", "palm_540b: 46.48% is too high", "118, 48 * 256,", "118, 18432,"),
        ("plan", "a card, which is two devices", "24 * CARDS * PRICE", "24 * DEVICES * PRICE"),
    ],
    "6": [
        ("kill_that_loses", "counted from 0", "KILL_AT = 2", "KILL_AT = 0"),
        ("silent_kill", "which anybody notices", "SILENT_KILL_AT = 3", "SILENT_KILL_AT = 2"),
        (
            "undisturbed",
            "load returned step 9",
            "numbers[step] for step in sorted(numbers)",
            "numbers[step] for step in sorted(numbers, key=str)",
        ),
        (
            "fifty_kills",
            "before the new one is complete",
            "    with open(temporary",
            "    for old in checkpoints(folder):\n        old.unlink()\n    with open(temporary",
        ),
        ("damage", "Is there a checksum?", "if checksum != ", "if not checksum and checksum != "),
        ("other_files", "removed notes.txt", 'glob("step-*.tmp")', 'glob("*.t*")'),
        (
            "nothing_piles_up",
            "more than 6 times",
            "checkpoints(folder)[:-KEEP]",
            "checkpoints(folder)[:-10]",
        ),
        ("power_failure", "os.fsync waited for 0", "os.fsync(file.fileno())", "pass"),
    ],
    "7": [
        ("forward", "A = [[1 + 2**-10, -1]]", "x.to(A.dtype) @ A.T", "(x @ A.to(x.dtype).T).to(A)"),
        (
            "backward",
            "dx, for dy = 1",
            "dy @ W + through_update",
            "dy @ W + 0 * through_update",
        ),
        ("memory", "never form B A", "scale * (low @ B.T)", "scale * x.to(A.dtype) @ (B @ A).T"),
        (
            "merge",
            "round once",
            "(W.to(A.dtype) + scale * (B @ A))",
            "(W + (scale * (B @ A)).to(W))",
        ),
        ("unmerge", "unmerge", "merge(merged, A, B, -scale)", "merge(merged, A, B, -1)"),
    ],
    "8": [
        ("isoflop_optimum", "log N", "x = np.log(sizes)", "x = np.array(sizes)"),
        ("fit_power_law", "the slope, a, first", "a, log_k = np", "log_k, a = np"),
        ("prediction", "the bet is lost", '"band": 0.1', '"band": 0.001'),
    ],
}
