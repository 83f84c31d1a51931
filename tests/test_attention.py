"""attention.py: each implementation equals the formula written as a loop, forward and backward."""

import functools
import math
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from tracing.tracer import Tracer

import attention as attention_module
import parallel
from attention import ScoreRule, alibi_slopes, attention, attention_bias, choose
from config import MPTConfig
from fast import cpu_attention, first_use, flex_attention, launch_table
from fast.alibi_columns import with_alibi_columns
from planning import memory
from program import UserError


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of 24 queries, so that a row of 65 tokens has several."""
    monkeypatch.setattr(cpu_attention, "BLOCK", 24)


def by_hand(q, k, v, slopes=None, causal=True, scale=None, window=None, softcap=None):
    """softmax(q k^T scale - slope * distance) v over the visible keys, one query at a time."""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    scale = scale or D**-0.5
    rows = []
    for b in range(B):
        for h in range(H):
            key_head = h * Hkv // H  # grouped-query: neighbouring heads share keys and values
            for i in range(Tq):
                position = Tk - Tq + i
                begin = 0 if window is None else max(0, position - window)
                end = position + 1 if causal else Tk
                keys = k[b, key_head, begin:end]
                values = v[b, key_head, begin:end]
                scores = keys @ q[b, h, i] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if slopes is not None:
                    distance = (position - torch.arange(begin, end)).abs().to(q.dtype)
                    scores = scores - slopes[h].to(q.dtype) * distance
                rows.append(torch.softmax(scores, 0) @ values)
    return torch.stack(rows).view(B, H, Tq, D)


def qkv(heads=(4, 2), lengths=(17, 17), head_dim=16, batch=1):
    """q (B, H, Tq, D) and k, v (B, Hkv, Tk, D) in float64."""
    torch.manual_seed(0)
    H, Hkv = heads
    Tq, Tk = lengths
    shapes = [(batch, H, Tq, head_dim), (batch, Hkv, Tk, head_dim), (batch, Hkv, Tk, head_dim)]
    return [torch.randn(shape, dtype=torch.double) for shape in shapes]


def output_and_gradients(function, inputs):
    """[output, dq, dk, dv] in float64, for a random but fixed incoming gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(out.shape, generator=generator, dtype=torch.double)
    gradients = torch.autograd.grad(out, leaves, incoming.to(out.dtype))
    return [x.detach().double() for x in (out, *gradients)]


def relative_error(found, exact):
    """The largest difference, over the largest exact value."""
    return (found - exact).abs().max().item() / exact.abs().max().item()


# --- slopes


@pytest.mark.parametrize(
    "n_heads, bias_max, slopes",
    [
        (1, 8, [2**-8]),
        (8, 8, [2**-i for i in range(1, 9)]),  # the paper's
        (8, 16, [2 ** (-2 * i) for i in range(1, 9)]),
        # Of 2^(-i / 2), i = 1..16: the 8 with even i, then the first 4 with odd i.
        (12, 8, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_bias_max_is_the_exponent_of_the_last_slope(n_heads, bias_max, slopes):
    found = alibi_slopes(n_heads, bias_max)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(slopes)


def test_the_bias_of_a_small_case():
    inf = math.inf
    plain = ScoreRule(1.0)
    assert attention_bias(2, 3, plain, "cpu").tolist() == [[0, 0, -inf], [0, 0, 0]]
    one_before = plain._replace(window=1)
    assert attention_bias(2, 4, one_before, "cpu").tolist() == [
        [-inf, 0, 0, -inf],
        [-inf, -inf, 0, 0],
    ]
    half, one = torch.tensor([0.5]), torch.tensor([1.0])  # slopes of one head
    expected = [[[-0.5, 0, -inf], [-1, -0.5, 0]]]
    assert attention_bias(2, 3, ScoreRule(1.0, half), "cpu").tolist() == expected
    both_ways = ScoreRule(1.0, one, causal=False)
    assert attention_bias(1, 3, both_ways, "cpu").tolist() == [[[-2, -1, 0]]]


# --- implementations against the loop

# (queries, keys): with fewer queries than keys, decoding on a cache
LENGTHS = [(1, 1), (65, 65), (1, 65), (40, 65)]
CASES = [dict(alibi=alibi, lengths=lengths) for alibi in (False, True) for lengths in LENGTHS]
CASES += [dict(alibi=alibi, causal=False, lengths=(7, 65)) for alibi in (False, True)]
CASES += [dict(heads=h) for h in ((4, 4), (6, 1), (12, 12))]  # of queries, of keys
CASES += [dict(head_dim=80), dict(scale=0.3), dict(batch=3), dict(bias_max=16)]
CASES += [dict(window=window, lengths=(65, 65)) for window in (0, 9, 30, 64)]
CASES += [dict(window=9, lengths=lengths, alibi=False) for lengths in LENGTHS[1:]]
CAPPED = [dict(softcap=0.5, lengths=lengths) for lengths in LENGTHS[1:]]
CAPPED += [dict(softcap=50.0, window=9, lengths=(65, 65), alibi=False)]

DEFAULT = dict(
    alibi=True,
    causal=True,
    heads=(4, 2),
    lengths=(17, 17),
    head_dim=16,
    batch=1,
    bias_max=8,
    scale=None,
    window=None,
    softcap=None,
)


@functools.cache
def exactly(items, dtype):
    """Of a case: q, k, v, slopes, and what the loop gives, once for all implementations."""
    case = dict(items)
    inputs = qkv(case["heads"], case["lengths"], case["head_dim"], case["batch"])
    inputs = [x.to(dtype) for x in inputs]  # the loop gets the rounded values
    slopes = alibi_slopes(case["heads"][0], case["bias_max"]) if case["alibi"] else None

    def exact_function(q, k, v):
        rest = case["causal"], case["scale"], case["window"], case["softcap"]
        return by_hand(q, k, v, slopes, *rest)

    exact = output_and_gradients(exact_function, [x.double() for x in inputs])
    return inputs, slopes, exact


def check(case, impl, dtype, limit):
    """Compare `impl` in `dtype` with the loop in float64: relative errors below `limit`."""
    case = DEFAULT | case
    inputs, slopes, exact = exactly(tuple(case.items()), dtype)
    rule = {name: case[name] for name in ("causal", "window", "softcap")}

    def function(q, k, v):
        rest = {"alibi_slopes": slopes, "softmax_scale": case["scale"]}
        return attention(q, k, v, impl=impl, **rule, **rest)

    found = output_and_gradients(function, inputs)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        if b.abs().max() > 1e-12:  # with one key the scores do not matter: dq = dk = 0
            assert relative_error(a, b) < limit, name
        else:
            assert a.abs().max() < limit, name


def name(case):
    """A test id."""
    return "-".join(f"{k}={v}".replace(" ", "") for k, v in case.items())


@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_fp32_equals_the_loop_in_fp64(case, impl):
    check(case, impl, torch.float32, 1e-5)


@pytest.mark.parametrize("impl", ["reference", "blocks"])
@pytest.mark.parametrize("case", CAPPED, ids=name)
def test_with_a_softcap_fp32_equals_the_loop_in_fp64(case, impl):
    check(case, impl, torch.float32, 1e-5)


@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize("case", CASES[::3], ids=name)
def test_bf16_is_close_to_the_loop_in_fp64(case, impl):
    check(case, impl, torch.bfloat16, 2e-2)


@pytest.fixture
def fresh_compiler():
    """Forget compiled functions, as in a new process."""
    torch._dynamo.reset()
    flex_attention.compiled_flex.cache_clear()


@pytest.mark.slow  # a compilation per case
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    "lengths, alibi, more",
    [
        ([(200, 200)], False, {"causal": False}),
        ([(20, 20), (1, 21), (1, 22), (1, 23)], True, {}),  # a prompt, then token after token
        ([(200, 200), (1, 201), (9, 209)], True, {"window": 30, "softcap": 1.0}),
        ([(300, 300)], False, {"window": 0, "documents": True}),
    ],
)
def test_flex_equals_the_formula(lengths, alibi, more, fresh_compiler):
    """Forward only: FlexAttention has no backward on a CPU."""
    slopes = alibi_slopes(4) if alibi else None
    for n_queries, n_keys in lengths:
        q, k, v = (x.float() for x in qkv(lengths=(n_queries, n_keys), head_dim=64))
        settings = more | {"alibi_slopes": slopes}
        if settings.pop("documents", False):
            settings["sequence_ids"] = torch.arange(n_keys)[None] // 70
        with torch.no_grad():
            found = attention(q, k, v, impl="flex", **settings)
        exact = attention(q.double(), k.double(), v.double(), impl="reference", **settings)
        assert relative_error(found, exact) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize(
    "impl, more",
    [
        *((impl, {}) for impl in ("reference", "blocks", "sdpa", "flex", "triton")),
        *((impl, {"window": 30, "softcap": 1.0}) for impl in ("blocks", "flex", "triton")),
    ],
    ids=str,
)
@pytest.mark.parametrize("alibi", [False, True])
def test_on_a_gpu_all_agree_forward_and_backward(impl, more, alibi):
    device = torch.device("cuda")
    inputs = [x.to(device, torch.bfloat16) for x in qkv((4, 2), (200, 200), 64)]
    slopes = alibi_slopes(4, device=device) if alibi else None
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, impl=impl, alibi_slopes=slopes, **more)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    exact_leaves = [x.cpu().double().requires_grad_() for x in inputs]
    exact = by_hand(*exact_leaves, alibi_slopes(4) if alibi else None, **more)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, torch.ones_like(exact))
    for found, wanted in zip((out, *gradients), (exact, *exact_gradients), strict=True):
        assert relative_error(found.detach().cpu().double(), wanted.detach()) < 2e-2


# --- ALiBi without a mask


def rms(x):
    """The root of the mean square."""
    return x.double().square().mean().sqrt().item()


@pytest.fixture
def long_rows():
    """2048 bf16 tokens, 4 heads: q, k, v, slopes, and the exact output."""
    q, k, v = (x.bfloat16() for x in qkv((4, 4), (2048, 2048), 64))
    slopes = alibi_slopes(4)
    bias = attention_bias(2048, 2048, ScoreRule(1.0, slopes), "cpu").double()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=bias)
    return q, k, v, slopes, exact


def test_long_rows_in_bf16_lose_little_more_than_the_rounding_of_the_output(long_rows):
    """One bf16 column would be off by whole units at slope * 2000, a mask by a tenth as much."""
    q, k, v, slopes, exact = long_rows
    error = rms(attention(q, k, v, impl="sdpa", alibi_slopes=slopes) - exact)
    assert error < 1.5 * rms(exact.bfloat16() - exact)
    wide = [x.float() for x in with_alibi_columns(q, k, v, ScoreRule(1 / 8, slopes))]
    in_fp32 = F.scaled_dot_product_attention(*wide, is_causal=True, scale=1 / 8)[..., :64]
    assert relative_error(in_fp32, exact) < 1e-5


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_holds_no_t_by_t_tensor(alibi, dtype):
    T = 1024
    slopes = alibi_slopes(2) if alibi else None
    sizes = {}
    for impl in ("sdpa", "reference"):
        inputs = [x.to(dtype).requires_grad_() for x in qkv((2, 1), (T, T), 16)]
        with Tracer() as trace:
            attention(*inputs, impl=impl, alibi_slopes=slopes).sum().backward()
        sizes[impl] = trace.largest()
    assert sizes["sdpa"] < T * T / 8
    assert sizes["reference"] == 2 * T * T  # it does hold one, and the measurement sees it


def test_decoding_one_token_in_16_bits_needs_no_mask(monkeypatch):
    """A mask would round slope * distance to 8 bits."""
    monkeypatch.setattr(attention_module, "attention_bias", None)  # a call would raise TypeError
    q, k, v = (x.bfloat16() for x in qkv(lengths=(1, 65)))
    slopes = alibi_slopes(4)
    found = attention(q, k, v, impl="sdpa", alibi_slopes=slopes)
    exact = by_hand(q.float(), k.float(), v.float(), slopes)
    assert relative_error(found.float(), exact) < 1e-2


@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("lengths", [(1, 65), (65, 65), (40, 65)])
def test_documents_do_not_see_each_other(impl, alibi, lengths):
    """Output and gradients are those of each document on its own; row 1 is one document."""
    inputs, slopes = qkv(lengths=lengths, batch=2), alibi_slopes(4) if alibi else None
    n_queries, n_keys = lengths
    first = n_keys // 3  # tokens of the first document of row 0
    ids = torch.stack([(torch.arange(n_keys) >= first).int(), torch.full((n_keys,), 7)])
    more = {"impl": impl, "alibi_slopes": slopes, "softmax_scale": 0.3}
    together = output_and_gradients(
        lambda q, k, v: attention(q, k, v, sequence_ids=ids, **more), inputs
    )

    def one_by_one(q, k, v):
        last = slice(-min(n_queries, n_keys - first), None)  # queries of the second document
        row = by_hand(q[:1, :, last], k[:1, :, first:], v[:1, :, first:], slopes, scale=0.3)
        if before := n_queries - row.shape[2]:
            parts = q[:1, :, :before], k[:1, :, :first], v[:1, :, :first]
            row = torch.cat([by_hand(*parts, slopes, scale=0.3), row], dim=2)
        return torch.cat([row, by_hand(q[1:], k[1:], v[1:], slopes, scale=0.3)])

    for a, b in zip(together, output_and_gradients(one_by_one, inputs), strict=True):
        assert (a - b).abs().max() < 1e-6 * b.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("impl, softcap", [("blocks", None), ("blocks", 0.5), ("sdpa", None)])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("lengths", [(1, 65), (65, 65), (40, 65)])
def test_documents_within_a_window(impl, softcap, window, lengths):
    ids = torch.stack([torch.arange(65) // 30, torch.zeros(65).long()])
    more = {"alibi_slopes": alibi_slopes(4), "sequence_ids": ids}
    more |= {"window": window, "softcap": softcap}
    found, exact = (
        output_and_gradients(
            lambda q, k, v, way=way: attention(q, k, v, impl=way, **more),
            qkv(lengths=lengths, batch=2),
        )
        for way in (impl, "reference")
    )
    for a, b in zip(found, exact, strict=True):
        assert (a - b).abs().max() < 1e-6


def test_sdpa_refuses_a_softcap():
    with pytest.raises(UserError, match="attn_impl=sdpa has no softcap: use auto"):
        attention(*qkv(), impl="sdpa", softcap=1.0)


# --- blocks


def saved_and_gradients(impl):
    """(bytes that the forward saves, [output, dq, dk, dv]) of 200 tokens with ALiBi, in fp32."""
    inputs = [x.float() for x in qkv((4, 4), (200, 200))]
    slopes = alibi_slopes(4)
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = output_and_gradients(
            lambda q, k, v: attention(q, k, v, impl=impl, alibi_slopes=slopes), inputs
        )
    return sum(storages.values()), found


def test_blocks_save_the_scores_of_visible_keys_and_not_the_others():
    saved, found = saved_and_gradients("blocks")
    all_saved, exact = saved_and_gradients("reference")
    assert saved < 0.65 * all_saved
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < 1e-6


def test_blocks_are_differentiated_in_autocasts_dtype():
    """fp32 inputs under autocast: their gradients are fp32, computed from bf16."""
    inputs = [x.float().requires_grad_() for x in qkv(lengths=(65, 65))]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*inputs, impl="blocks")
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    attention(*exact, impl="reference").square().sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert ours.grad.dtype == torch.float32
        assert relative_error(ours.grad, theirs.grad) < 0.05


def test_blocks_keep_no_scores_where_no_gradient_is_wanted(monkeypatch):
    saved = []
    real = torch.autograd.function.FunctionCtx.save_for_backward

    def record(ctx, *tensors):
        saved.append(len(tensors))
        return real(ctx, *tensors)

    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", record)
    inputs = [x.requires_grad_() for x in qkv(lengths=(65, 65))]
    with torch.no_grad():
        attention(*inputs, impl="blocks")
    attention(*inputs, impl="blocks")
    assert saved == [3, 3 + 3]  # q, k, v; and the scores of three blocks


# --- the choice


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CASE = dict(device=GPU, dtype=torch.bfloat16, head_dim=64, masked=True, dropout_p=0.0)


@pytest.fixture
def triton_runs(monkeypatch):
    """Triton can run, and well, on an H100. Returns a function that names another architecture."""

    def name_gpu(arch):
        monkeypatch.setattr(launch_table, "architecture", lambda device: arch)

    monkeypatch.setattr(first_use, "can_build", lambda: True)
    monkeypatch.setattr(first_use, "is_right", lambda *_: True)
    launch_table.has_matrix_instructions.cache_clear()
    name_gpu("sm_90")
    return name_gpu


@pytest.mark.parametrize(
    "change, chosen",
    [
        ({}, "triton"),
        ({"head_dim": 128, "dtype": torch.float16}, "triton"),
        ({"masked": False}, "sdpa"),  # flash and cuDNN do that faster
        ({"masked": False, "softcap": 30.0}, "triton"),
        ({"dtype": torch.float32, "softcap": 30.0}, "flex"),
        ({"dropout_p": 0.1, "softcap": 30.0}, "blocks"),  # flex has no dropout
        ({"device": torch.device("mps"), "softcap": 30.0}, "blocks"),
        ({"dtype": torch.float32}, "sdpa"),
        ({"head_dim": 160}, "sdpa"),
        ({"dropout_p": 0.1}, "sdpa"),
        ({"device": torch.device("mps")}, "sdpa"),
        ({"device": CPU}, "blocks"),
    ],
    ids=str,
)
def test_auto(change, chosen, triton_runs):
    assert choose("auto", **CASE | change) == chosen


@pytest.mark.parametrize(
    "settings, chosen",
    [
        ({}, "sdpa"),
        ({"alibi": True}, "triton"),
        ({"sliding_window_size": 0}, "triton"),
        ({"attn_logit_softcapping": 30.0}, "triton"),
        ({"alibi": True, "attn_pdrop": 0.1}, "sdpa"),
        ({"alibi": True, "n_heads": 8}, "sdpa"),  # heads of 256
    ],
    ids=str,
)
def test_a_run_says_which_attention_its_settings_take_and_the_planner_knows(
    settings, chosen, triton_runs
):
    m = MPTConfig(**settings)
    assert parallel.attention_of(m, GPU, "bf16") == chosen
    assert memory.takes_triton(m) == (chosen == "triton")


def test_a_softcap_takes_the_kernel_only_if_it_is_right_with_one(triton_runs, monkeypatch):
    monkeypatch.setattr(first_use, "is_right", lambda gpu, dim, one_query, softcap: not softcap)
    assert choose("auto", **CASE) == "triton"
    assert choose("auto", **CASE, softcap=30.0) == "flex"


def test_a_single_query_takes_the_kernel_only_if_it_is_right_for_one(triton_runs, monkeypatch):
    """A single query has a launch row of its own. Compared are both rows."""
    monkeypatch.setattr(first_use, "is_right", lambda gpu, dim, one_query, _: not one_query)
    taken = []
    monkeypatch.setattr(attention_module, "triton_attention", lambda *a: taken.append(a[0].shape))
    on_a_gpu = lambda impl, device, *rest: choose(impl, GPU, *rest)  # noqa: E731
    monkeypatch.setattr(attention_module, "choose", on_a_gpu)
    k = torch.ones(2, 4, 9, 64, dtype=torch.bfloat16)
    for n_queries in (9, 1):
        attention(k[:, :, -n_queries:], k, k, alibi_slopes=alibi_slopes(4))
    assert taken == [(2, 4, 9, 64)]


ARCHITECTURES = dict.fromkeys(["sm_80", "gfx908", "gfx1100"], "triton")
ARCHITECTURES |= dict.fromkeys(["sm_75", "gfx906", "gfx1030"], "sdpa")


@pytest.mark.parametrize("arch, chosen", ARCHITECTURES.items())
def test_auto_takes_triton_where_it_has_matrix_instructions(arch, chosen, triton_runs, capsys):
    """Elsewhere one line says that it does not."""
    triton_runs(arch)
    assert choose("auto", **CASE | {"masked": False}) == "sdpa"
    assert capsys.readouterr().err == ""  # it would be sdpa on any GPU
    for _ in range(2):
        assert choose("auto", **CASE) == chosen
    line = capsys.readouterr().err
    assert line.count("\n") == (chosen == "sdpa")
    assert not line or (arch in line and "sdpa" in line)


@pytest.mark.parametrize("arch, sign", [("sm_90", 1), ("sm_75", -1)])
def test_the_choice_does_not_break_the_graph(arch, sign, triton_runs):
    """torch.compile takes the answer for a constant, and traces none of the questions."""
    triton_runs(arch)

    def chosen(x):
        return x if choose("auto", GPU, torch.bfloat16, 64, True) == "triton" else -x

    torch._dynamo.reset()
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [sign, sign]


def test_auto_without_triton_or_without_a_compiler_for_it(triton_runs, monkeypatch):
    monkeypatch.setattr(first_use, "can_build", lambda: False)
    assert choose("auto", **CASE) == "sdpa"


def test_without_triton_the_error_names_another_implementation(monkeypatch):
    monkeypatch.delitem(sys.modules, "fast.flash_attention", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match="attn_impl=triton needs triton.*attn_impl=sdpa"):
        attention(*qkv(), impl="triton")


@pytest.mark.parametrize("impl", ["reference", "blocks", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_zeroes_probabilities_and_keeps_their_mean(impl, causal):
    """A quarter of the probabilities of a row, which sum to 1, is dropped."""
    torch.manual_seed(0)
    q = k = torch.zeros(256, 2, 60, 16)
    v = torch.ones(256, 2, 60, 16)
    out = attention(q, k, v, impl=impl, causal=causal, dropout_p=0.25)
    assert out.std() > 0.05 and out.mean().item() == pytest.approx(1, abs=0.01)


def test_flex_refuses_dropout():
    with pytest.raises(UserError, match="attn_pdrop=0"):
        attention(*qkv(), impl="flex", dropout_p=0.1)
