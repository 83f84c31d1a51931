"""The best models that a fleet trains in some days: compute-optimal, and half as large for longer.

    loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28      N parameters, D tokens: Chinchilla's fit
    D = 20 N                                           about where it is lowest for its compute

A smaller model trained for longer loses little by this fit, and is cheaper to serve. search.py
finds the layout of each.

`python plan.py --device=h100 --devices=512 --budget=14` prints the models of 14 days.
"""

import math
from dataclasses import replace

import flops
from config import MPTConfig
from planning.search import Plan, Question, fastest
from program import UserError

TOKENS_PER_PARAMETER = 20  # Chinchilla (arXiv 2203.15556)
SHAPE = ("d_model", "n_heads", "n_layers", "kv_n_heads")  # what `shape` sets

# The widths that `budget` tries, the largest first.
WIDTHS = [
    *range(32768, 8192, -1024),
    *range(8192, 4096, -512),
    *range(4096, 2048, -256),
    *range(2048, 0, -128),
]
# {d_model: n_layers} of MPT's sizes, and of larger models of these proportions.
SIZES = {
    128: 12,
    768: 12,
    1024: 24,
    2048: 24,
    2560: 32,
    4096: 32,
    5120: 40,
    7168: 48,
    8192: 80,
    12288: 96,
    32768: 160,
}


def chinchilla_loss(n_params: float, tokens: float) -> float:
    """Nats a token on Chinchilla's data, by its published fit (arXiv 2203.15556)."""
    return 1.69 + 406.4 / n_params**0.34 + 410.7 / tokens**0.28


def shape(d_model: int, m: MPTConfig) -> MPTConfig:
    """`m` with this width and MPT's proportions.

    Heads are 128 wide; the layers are interpolated between the nearest of SIZES.
    """
    below = max(width for width in SIZES if width <= d_model)
    above = min(width for width in SIZES if width >= d_model)
    share = (d_model - below) / (above - below) if above > below else 0
    layers = round(SIZES[below] + share * (SIZES[above] - SIZES[below]))
    return replace(m, d_model=d_model, n_heads=d_model // 128, kv_n_heads=None, n_layers=layers)


def model_of(n_params: float, m: MPTConfig) -> MPTConfig | None:
    """The largest model like `m` with at most this many parameters. None if that is too few.

    Its width is the one whose `shape` has the nearest number; then it gets an even number of
    layers, as many as there are parameters for.
    """
    shapes = [shape(width, m) for width in WIDTHS]
    if n_params < flops.n_params(shapes[-1]):
        return None
    nearest = min(shapes, key=lambda model: abs(math.log(flops.n_params(model) / n_params)))
    without_layers = flops.n_params(replace(nearest, n_layers=0))
    of_two = flops.n_params(replace(nearest, n_layers=2)) - without_layers
    return replace(nearest, n_layers=max(2, 2 * int((n_params - without_layers) // of_two)))


def train_for(days: float, m: MPTConfig, q: Question) -> tuple[Plan, float]:
    """The fastest plan for the model, and the tokens of all steps that it takes in so many days.

    Raises UserError as `search.best`.
    """
    plan = fastest(replace(q, m=m))
    steps = int(days * 86400 / plan.seconds["step"])
    return plan, float(steps * plan.cfg.global_batch_size * m.max_seq_len)


def budget(q: Question, days: float) -> list[tuple[Plan, float]]:
    """The best that the fleet can train in so many days, and on how many tokens: [(plan, tokens)].

    The first is Chinchilla's optimum (2203.15556): the largest model that sees at least 20 tokens a
    parameter, or the largest found that fits if memory allows only smaller ones. The second has
    half its parameters and sees more of them. Both take all the time.

    Each trial says how large a model its FLOP/s could train: the next one to try. Raises UserError
    if there is none.
    """
    devices = f"{q.fleet.devices} x {q.fleet.device.name}"
    problem = UserError(f"{days:g} days on {devices} are too few for any model")
    flops_of_run = 0.4 * q.fleet.devices * q.fleet.device.bf16_tflops * 1e12 * 86400 * days
    n = math.sqrt(flops_of_run / 6 / TOKENS_PER_PARAMETER)
    tried, trainings = [], {}
    while (model := model_of(n, q.m)) and model not in tried:
        tried.append(model)
        n_params = flops.n_params(model)
        try:
            plan, tokens = train_for(days, model, q)
        except UserError as error:  # it does not fit
            problem = error
            n *= 0.8
            continue
        if tokens >= TOKENS_PER_PARAMETER * n_params:
            trainings[n_params] = plan, tokens
        n = math.sqrt(n_params * tokens / TOKENS_PER_PARAMETER)

    if not trainings:
        raise problem
    largest = max(trainings)
    half = model_of(largest / 2, q.m)
    smaller = [train_for(days, half, q)] if half else []
    return [trainings[largest], *smaller]
