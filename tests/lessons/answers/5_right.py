"""Right: counts products pass by pass, and the FLOPs of a whole run at once."""


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


def plan():
    shapes = {
        "mpt-7b": (6_658_859_008, 32, 4096),
        "mpt-3b": (2_651_837_440, 32, 2560),
        "mpt-1b": (1_315_950_592, 24, 2048),
    }
    for name, (n, layers, d) in shapes.items():
        needed = 20 * n * (6 * n + 12 * layers * d * 2048)  # FLOPs
        cards = 2 * 181.05e12 * 0.458  # FLOP/s of one of four
        hours = needed / (4 * cards) / 3600
        if 6 * hours <= 3000:
            return {
                "model": name,
                "tokens_per_second": 20 * n / hours / 3600,
                "tokens": 20 * n,
                "days": hours / 24,
                "dollars": 6 * hours,
            }
