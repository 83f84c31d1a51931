"""Right: counts products pass by pass, prices each linear layer on its own, tries microbatches."""

import math


def training_flops(n, n_layers, width, seq_len, attention="full", frozen=False, recompute=False):
    passes = {"weights": 3 - frozen + recompute, "scores": 3 + recompute}
    keys = {"none": 0, "causal": seq_len / 2, "full": seq_len}[attention]
    return 2 * n * passes["weights"] + 2 * 2 * keys * width * n_layers * passes["scores"]


def mfu(flops_per_token, tokens_per_second, devices, peak_flops):
    needed = flops_per_token / peak_flops  # seconds of one device for a token
    return needed * tokens_per_second / devices


def matmul_intensity(m, k, n, bytes_per_number):
    return 2 / (bytes_per_number * (1 / n + 1 / m + 1 / k))


def attainable(intensity, peak_flops, bandwidth):
    ridge = peak_flops / bandwidth
    return peak_flops if intensity >= ridge else peak_flops * intensity / ridge


def palm_540b(tokens_per_second=238.3e3):
    of_the_run = tokens_per_second * (6 * 540.35e9 + 12 * 118 * (48 * 256) * 2048)
    return of_the_run / (6144 * 275e12)


def mpt_1b(tokens_per_second=20_513):
    return mfu(training_flops(1_315_950_592, 24, 2048, 2048), 8 * tokens_per_second, 8, 312e12)


def gpt_175b(seconds=13.75):
    h, layers, s, v, batch = 12288, 96, 2048, 51200, 64
    of_a_step = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    return of_a_step / seconds / (64 * 312e12)


def step_seconds(
    n,
    n_layers,
    d_model,
    seq_len,
    vocab_size,
    global_batch_size,
    microbatch_size,
    devices,
    device,
):
    tokens = microbatch_size * seq_len
    rate = device["peak_flops"] * device["reachable"]
    d, tile = d_model, 2.4e6
    matmuls = 0.0
    shapes = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)] * n_layers + [(d, vocab_size)]
    for n_in, n_out in shapes:
        for area in (tokens * n_out, tokens * n_in):  # forward, gradient of the input
            matmuls += 3 * tokens * n_in * n_out / rate * (1 + tile / area)
    of_keys = training_flops(0, n_layers, d, seq_len, "causal") * 7 / 6
    attention = of_keys * tokens / (device["peak_flops"] * device["attention"])
    moved = tokens * (351 * n_layers * d + 6 * vocab_size) + 30 * n
    work = matmuls + attention + moved / device["bandwidth"]
    sent = 8 * n * (1 - 1 / devices) / (0.7 * device["link"])
    microbatches = math.ceil(global_batch_size / devices / microbatch_size)
    return microbatches * (work**1.35 + sent**1.35) ** (1 / 1.35)


def plan():
    shapes = {
        "mpt-7b": (6_658_859_008, 32, 4096),
        "mpt-3b": (2_651_837_440, 32, 2560),
        "mpt-1b": (1_315_950_592, 24, 2048),
    }
    device = {
        "peak_flops": 181.05e12,
        "reachable": 0.72,
        "attention": 0.25,
        "bandwidth": 1638.4e9,
        "link": 100e9,
    }
    for name, (n, layers, d) in shapes.items():
        step, size = math.inf, 0
        for rows in (1, 2, 4, 8, 16):
            held = 2 * n + 32 * layers * d * 2048 * rows + 3e9
            took = step_seconds(n, layers, d, 2048, 50368, 512, rows, 8, device)
            if held < 0.92 * 64 * 2**30 and took < step:
                step, size = took, rows
        tokens = 20 * n
        hours = tokens / (512 * 2048) * step / 3600
        if 6 * hours <= 3000:  # four cards at 1.50
            return {
                "model": name,
                "microbatch_size": size,
                "tokens_per_second": 512 * 2048 / step,
                "tokens": tokens,
                "days": hours / 24,
                "dollars": 6 * hours,
            }
