"""flash_attention.py in Triton's interpreter, or on a GPU, against its obvious version in float64.

The interpreter is chosen when a kernel is decorated, so the kernels run in other processes: those
of the fixture `interpreted`.
"""

import dataclasses
import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import refusal, slowly
from tracing.tracer import Tracer

pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")

from attention import alibi_slopes, attention  # noqa: E402
from config import MPTConfig
from fast import flash_attention as kernels  # noqa: E402
from fast import launch_table  # noqa: E402
from fast.launch_table import ONE_QUERY  # noqa: E402
from model import MPT, init_weights  # noqa: E402
from program import UserError
from serving.decoder import Decoder
from serving.step_graph import StepGraphs, VisibleKeys

LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}  # relative to the largest exact value


# --- one case

DEFAULT = dict(
    lengths=(65, 65),  # queries, keys
    heads=(2, 2),  # of queries, of keys
    D=32,
    batch=1,
    dtype="float32",
    alibi=True,
    causal=True,
    documents=False,
    window=None,
    softcap=None,
    scale=None,
    layout="fused",
    row=None,  # launch settings instead of the table's
)


def qkv_of(case, generator, device):
    """q, k, v in the case's memory layout."""
    H, Hkv = case["heads"]
    Tq, Tk = case["lengths"]
    D, B, dtype = case["D"], case["batch"], getattr(torch, case["dtype"])

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    if case["layout"] == "fused":
        # Views of one Wqkv output, as in the model. The queries are its last rows.
        wide = draw(B, max(Tq, Tk), (H + 2 * Hkv) * D)
        q, k, v = wide.split([H * D, Hkv * D, Hkv * D], dim=-1)
        q, k, v = (x[:, x.shape[1] - T :] for x, T in ((q, Tq), (k, Tk), (v, Tk)))
        return [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, k, v)]
    if case["layout"] == "cache":
        # Keys and values are the beginning of a longer buffer.
        q = draw(B, H, Tq, D)
        k, v = (draw(B, Hkv, Tk + 30, D)[:, :, :Tk] for _ in range(2))
        return [q, k, v]
    # "transposed": the head dim is not the innermost
    return [draw(B, heads, D, T).mT for heads, T in ((H, Tq), (Hkv, Tk), (Hkv, Tk))]


def tensors_of(case, device="cpu"):
    """q, k, v, slopes, document ids, and the incoming gradient."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    q, k, v = qkv_of(case, generator, device)
    B, H = q.shape[:2]
    n_keys = k.shape[2]
    slopes = alibi_slopes(H, device=device) if case["alibi"] else None
    ids = None
    if case["documents"]:
        ids = torch.randint(0, 4, (B, n_keys), generator=generator).sort(1).values.to(device)
        ids[:, : n_keys // 8] = 9  # ids need not be sorted: a document begins where the id changes
    do = torch.randn(q.shape, generator=generator).to(device, q.dtype)
    return [q, k, v, slopes, ids, do]


def run(case, tensors):
    """[out, dq, dk, dv] of the kernels."""
    q, k, v, slopes, ids, do = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = kernels.flash_attention(
        *leaves,
        alibi_slopes=slopes,
        causal=case["causal"],
        softmax_scale=case["scale"],
        sequence_ids=ids,
        window=case["window"],
        softcap=case["softcap"],
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def errors_of(case, device="cpu"):
    """Errors of out, dq, dk, dv against float64, relative to the largest exact value."""
    case = DEFAULT | case
    tensors = tensors_of(case, device)
    with pytest.MonkeyPatch.context() as patch:
        if case["row"]:
            patch.setattr(launch_table, "row_for", lambda *_: case["row"])
        found = run(case, tensors)

    q, k, v, slopes, ids, do = (x if x is None else x.cpu() for x in tensors)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = kernels.reference_attention(
        *leaves,
        slopes,
        case["causal"],
        case["scale"],
        ids,
        case["window"],
        case["softcap"],
    )
    exact = [out.detach(), *torch.autograd.grad(out, leaves, do.double())]

    assert all(x.isfinite().all() for x in found)
    assert [x.dtype for x in found] == [q.dtype] * 4
    errors = []
    for a, b in zip(found, exact, strict=True):
        largest = b.abs().max().item()
        error = (a.cpu() - b).abs().max().item()
        # With one visible key, dq and dk are zero: the error is absolute then.
        errors.append(error / largest if largest > 1e-12 else error)
    return errors


# --- the grid

FLAGS = [
    dict(alibi=alibi, causal=causal, documents=documents)
    for alibi in (True, False)
    for causal in (True, False)
    for documents in (False, True)
]
ROWS = [(128, 64, 4, 1), (32, 128, 4, 1), (128, 32, 4, 1), (128, 128, 4, 1)]
# Masks only on the diagonal: blocks of at least 64 keys.
ON_THE_DIAGONAL = [
    dict(lengths=(130, 130), row=(32, 64, 4, 1), heads=(2, 1)),
    dict(lengths=(70, 141), row=(32, 64, 4, 1), heads=(1, 1), alibi=False),
    dict(lengths=(201, 130), row=(32, 128, 4, 1)),
]

QUICK = [*FLAGS, dict(lengths=(1, 65)), dict(D=80, heads=(1, 1)), dict(layout="cache", batch=2)]
QUICK += [dict(lengths=(65, 17))]  # more queries than keys: the first rows see no key when causal
QUICK += [dict(D=96, dtype=dtype) for dtype in ("float16", "bfloat16")]  # 96: two widths
QUICK += [dict(window=0), dict(window=20, documents=True), dict(window=20, lengths=(1, 65))]
QUICK += [dict(softcap=1.0), dict(softcap=1.0, window=20, lengths=(17, 65), alibi=False)]

SLOW = [dict(lengths=(1, 1)), dict(lengths=(127, 1)), dict(lengths=(127, 127), documents=True)]
SLOW += [dict(lengths=(17, 200), documents=True, causal=c) for c in (True, False)]
SLOW += [dict(lengths=(65, 17), causal=False), dict(heads=(7, 1), D=17), dict(D=128)]
SLOW += [dict(lengths=(140, 140), row=row, heads=(1, 1), documents=True) for row in ROWS]
SLOW += [dict(layout="transposed", batch=2), dict(scale=0.01, alibi=False)]
SLOW += [dict(window=window, lengths=(140, 140), heads=(2, 1)) for window in (1, 64, 139, 500)]
SLOW += [dict(softcap=c, causal=False, heads=(2, 1), D=96) for c in (0.5, 50.0)]
SLOW += [dict(softcap=1.0, window=50, documents=True, lengths=(140, 140), row=ROWS[0])]
SLOW += [dict(dtype="bfloat16"), dict(dtype="bfloat16", D=128, heads=(7, 1)), *ON_THE_DIAGONAL]
CASES = QUICK + SLOW


def name(case):
    """A test id."""
    return "-".join(f"{k}={v}".replace(" ", "") for k, v in case.items())


def share(world, cases):
    """{name: errors, or the error's text} of this process's part of the cases."""
    results = {}
    for case in cases[world.global_rank :: world.global_size]:
        try:
            results[name(case)] = errors_of(case)
        except Exception as error:
            results[name(case)] = repr(error)
    return results


@pytest.fixture(scope="module")
def measured(interpreted, request):
    """{name of a case: errors} of the cases of this session; two processes share them."""
    wanted = {item.name.partition("[")[2][:-1] for item in request.session.items}
    cases = [case for case in CASES if name(case) in wanted]
    errors = {}
    for begin in range(0, len(cases), 16):  # a call has a time limit, and all take minutes
        first, second = interpreted(share, cases[begin : begin + 16])
        errors |= first | second
    return errors


@pytest.mark.parametrize("case", [*QUICK, *map(slowly, SLOW)], ids=name)
def test_output_and_gradients_equal_those_in_fp64(case, measured):
    errors = measured[name(case)]
    assert isinstance(errors, list), errors
    assert max(errors) < LIMITS[case.get("dtype", "float32")], errors


def masked_and_not(world):
    """Whether [out, dq, dk, dv] are equal with the masks left out below the diagonal, and with all.

    A row that is one document has a mask on every block, and computes the same.
    """
    equal = []
    for case in ON_THE_DIAGONAL[:2]:
        case = DEFAULT | case
        tensors = tensors_of(case)
        n_keys = case["lengths"][1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_table, "row_for", lambda *_, row=case["row"]: row)
            ours = run(case, tensors)
            tensors[4] = torch.zeros(1, n_keys, dtype=torch.long)
            masked = run(case, tensors)
        equal += [torch.equal(a, b) for a, b in zip(ours, masked, strict=True)]
    return equal


def test_diagonal_masks_are_enough(interpreted):
    assert interpreted(masked_and_not)[0] == [True] * 8


def sweep(world, examples, seed):
    """Random combinations of all settings: None, or the error of one that failed."""
    from hypothesis import Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    # With one or two keys, dq and dk are nearly zero, and a relative error has no meaning.
    some_keys = st.integers(8, 140)

    @seeded(seed + world.global_rank)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    @given(
        st.fixed_dictionaries(
            {
                "lengths": st.tuples(st.integers(1, 140), some_keys),
                "heads": st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
                "D": st.integers(8, 128),
                "batch": st.integers(1, 2),
                "alibi": st.booleans(),
                "causal": st.booleans(),
                "documents": st.booleans(),
                "window": st.sampled_from([None, None, 0, 9, 40, 200]),
                "softcap": st.sampled_from([None, 1.0]),
                "scale": st.sampled_from([None, 0.05]),
                "layout": st.sampled_from(["fused", "cache", "transposed"]),
                "row": st.sampled_from([None, (16, 64, 4, 1), *ROWS]),
                "seed": st.integers(0, 5),
            }
        )
    )
    def check(case):
        if case["lengths"][0] > case["lengths"][1]:
            case["documents"] = False
        if not case["causal"]:
            case["window"] = None
        assert max(errors_of(case)) < LIMITS["float32"], case

    try:
        check()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("examples", [slowly(8), pytest.param(120, marks=pytest.mark.long)])
def test_random_cases(interpreted, examples):
    assert interpreted(sweep, examples, examples) == [None, None]


def hidden_blocks(world):
    """The first document's keys and values are NaN: is the second's output unchanged, not NaN?"""
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    ids = torch.arange(256)[None] // 128
    whole = kernels.flash_attention(q, k, v, sequence_ids=ids)
    k[:, :, :128] = v[:, :, :128] = math.nan
    second = kernels.flash_attention(q, k, v, sequence_ids=ids)
    unchanged = torch.equal(whole[:, :, 128:], second[:, :, 128:])
    return unchanged, second[:, :, :128].isnan().all().item()


def test_a_document_before_is_skipped_not_multiplied_by_zero(interpreted):
    assert interpreted(hidden_blocks)[0] == (True, True)


# --- one query that sees a window of the keys: a captured step of the decoder


def errors_of_windows(world):
    """{(dtype, (heads of keys, D, ALiBi), row): error against float64}, of four rows of a cache."""
    errors = {}
    shapes = [(1, 32, True), (3, 96, False)]
    cases = itertools.product(LIMITS, shapes, (None, ONE_QUERY))
    for case in list(cases)[world.global_rank :: world.global_size]:
        dtype, (Hkv, D, alibi), row = case
        generator = torch.Generator().manual_seed(0)
        memory = torch.randn(2, 5, Hkv, 150, D, generator=generator).to(getattr(torch, dtype))
        k, v = memory[:, :4, :, :140]
        q = torch.randn(4, 1, 3, D, generator=generator).to(k.dtype).transpose(1, 2)
        first, end = torch.tensor([0, 5, 70, 90]), 91  # columns; the last row sees one of them
        slopes = alibi_slopes(3) if alibi else None
        visible = VisibleKeys(first, first * 0 + end, n_keys=140)
        settings = {"alibi_slopes": slopes, "visible": visible}
        with pytest.MonkeyPatch.context() as patch:
            if row:
                patch.setattr(launch_table, "row_for", lambda *_: ONE_QUERY)
            out = attention(q, k, v, impl="triton", **settings)
        for b in range(4):
            seen = (slice(b, b + 1), slice(None), slice(first[b], end))
            exact = kernels.reference_attention(
                *(x.double() for x in (q[b : b + 1], k[seen], v[seen])), slopes
            )
            error = (out[b : b + 1] - exact).abs().max() / exact.abs().max()
            errors[case] = max(error.item(), errors.get(case, 0.0))
    return errors


def test_a_window_equals_the_formula_in_fp64(interpreted):
    found = [pair for errors in interpreted(errors_of_windows) for pair in errors.items()]
    assert len(found) == 12
    assert not [(case, error) for case, error in found if not error < LIMITS[case[0]]]


def error_of_a_step(world, more):
    """Of a captured step's logits in fp32, against the whole text in float64, without a cache."""
    cfg = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=64, attn_impl="triton", **more)
    mpt = MPT(cfg).eval()
    init_weights(mpt, seed=0)
    exact_cfg = dataclasses.replace(cfg, attn_impl="reference")
    exact = MPT(exact_cfg).eval().double()
    exact.load_state_dict(mpt.state_dict())
    ids = torch.randint(64, (3, 21), generator=torch.Generator().manual_seed(0))
    pad = torch.tensor([0, 4, 9])
    decode = Decoder(mpt, 64)
    with torch.inference_mode():
        graphs = StepGraphs(decode, mpt.new_cache(4, 40, torch.float32))
        cache = graphs.empty(3, pad)
        decode(ids[:, :20], cache)
        graphs.fill(ids[:, 20:], cache, 4, 32, 0)
        logits = graphs.step(4, 32, 0)[:3]
        wanted = torch.stack([exact(row[None, n:])[0, -1] for row, n in zip(ids, pad, strict=True)])
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(
    "more",
    [
        {"alibi": True, "kv_n_heads": 2},
        {"sliding_window_size": 5, "attn_logit_softcapping": 1.0},
        slowly({"rope": True}),
    ],
    ids=str,
)
def test_a_captured_step_equals_the_whole_text_in_fp64(more, interpreted):
    assert interpreted(error_of_a_step, more)[0] < 1e-5


# --- the operator


def checked_by_pytorch(world):
    """Run opcheck with and without gradients, slopes and documents. It raises what it finds."""
    case = DEFAULT | dict(lengths=(20, 20), D=16, heads=(2, 1), documents=True)
    q, k, v, slopes, ids, _ = tensors_of(case)
    bounds = kernels.document_bounds(ids)
    for grad in (False, True):
        inputs = [x.detach().requires_grad_(grad) for x in (q, k, v)]
        for extra in ((slopes, bounds), (None, None)):
            torch.library.opcheck(kernels.forward_operator, (*inputs, *extra, True, 0.25))
    return True


@pytest.mark.slow
def test_pytorchs_own_checks_of_the_operator(interpreted):
    """torch.library.opcheck: schema, aliasing, shapes of the fakes, autograd, compilation."""
    assert interpreted(checked_by_pytorch)[0]


SMALL = dict(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=48, alibi=True)


def model_with(impl, **settings):
    """A small model with this attention."""
    model = MPT(MPTConfig(**SMALL | settings, attn_impl=impl))
    init_weights(model, seed=0)
    return model


def loss_and_gradients(model, ids):
    loss = model(ids[:, :-1], labels=ids[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def in_a_model(world, impl, settings, compiles=False):
    """[loss, gradient, ...] of a small model with this attention."""
    ids = torch.randint(0, 64, (2, 41), generator=torch.Generator().manual_seed(0))
    model = model_with(impl, **settings)
    if compiles:
        torch._dynamo.reset()
        for block in model.transformer.blocks:
            block.compile(backend="aot_eager", fullgraph=True)  # a break in the graph raises
    return loss_and_gradients(model, ids)


@pytest.mark.parametrize(
    "settings, compiles",
    [
        slowly({}, True),
        ({"kv_n_heads": 1, "clip_qkv": 0.5}, False),
        # q and k are no longer views of the projection
        ({"kv_n_heads": 1, "qk_ln": True, "rope": True, "alibi": False}, False),
    ],
    ids=str,
)
def test_in_a_model_it_gives_the_gradients_of_sdpa(settings, compiles, interpreted):
    ours = interpreted(in_a_model, "triton", settings, compiles)[0]
    sdpa = interpreted(in_a_model, "sdpa", settings)[0]
    assert (ours[0] - sdpa[0]).abs() <= 5e-6 * sdpa[0]
    largest = max(b.abs().max() for b in sdpa[1:])
    for a, b in zip(ours[1:], sdpa[1:], strict=True):
        assert (a - b).abs().max() <= 1e-5 * largest


def one_gradient(world, heads, documents, compiles):
    """Whether the gradient of a fused projection's output is equal, made in one piece and joined.

    Also the operations of autograd's backward when it is made in one piece.
    """
    H, Hkv = heads
    D = 16
    T = 20
    slopes = alibi_slopes(H)
    ids = torch.arange(T)[None].expand(2, -1) // 8 if documents else None
    x = torch.randn(2, T, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn((H + 2 * Hkv) * D, 8, generator=torch.Generator().manual_seed(1))
    do = torch.randn(2, T, H, D, generator=torch.Generator().manual_seed(2)).transpose(1, 2)

    def attend(bias, fused):
        qkv = F.linear(x, weight, bias)
        q, k, v = (
            part.view(2, T, -1, D).transpose(1, 2)
            for part in qkv.split([H * D, Hkv * D, Hkv * D], dim=-1)
        )
        extra = {"qkv": qkv} if fused else {}
        return kernels.flash_attention(q, k, v, alibi_slopes=slopes, sequence_ids=ids, **extra)

    if compiles:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    gradients, outputs = [], []
    for fused in (False, True):
        bias = torch.zeros(len(weight), requires_grad=True)
        out = attend(bias, fused)
        with Tracer() as trace:
            gradients += torch.autograd.grad(out, bias, do)
        outputs.append(out.detach())
    return torch.equal(*outputs) and torch.equal(*gradients), list(trace.counts())


@pytest.mark.parametrize(
    "heads, documents, compiles",
    [((6, 2), True, False), ((1, 1), False, False), slowly((6, 2), True, True)],
)
def test_the_projections_gradient_comes_in_one_piece_with_the_same_bits(
    heads, documents, compiles, interpreted
):
    equal, operations = interpreted(one_gradient, heads, documents, compiles)[0]
    assert equal
    assert "aten::cat" not in operations and "aten::copy_" not in operations
    assert "mpt::flash_attention_backward" in operations


def autocast_dtypes(world):
    """Dtypes of out and q's gradient under bf16 autocast, and the error of out."""
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    k = torch.randn(1, 2, 20, 16)
    v = torch.randn(1, 2, 20, 16).bfloat16()
    slopes = alibi_slopes(2) * 1.0001  # needs more bits than bf16 has
    with torch.autocast("cpu", torch.bfloat16):
        out = kernels.flash_attention(q, k, v, alibi_slopes=slopes)
    out.sum().backward()
    rounded = [x.detach().bfloat16().double() for x in (q, k, v)]
    exact = kernels.reference_attention(*rounded, slopes)
    return out.dtype, q.grad.dtype, (out - exact).abs().max().item()


def test_heads_of_another_projection_are_not_taken_for_those_of_this_one():
    """Else attention would read all three from the wrong projection."""
    qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
    q, k, v = kernels.heads_of(qkv, 4, 2)
    assert kernels.are_heads_of(qkv, q, k, v)
    assert not kernels.are_heads_of(qkv.clone(), q, k, v)
    assert not kernels.are_heads_of(qkv, q * 2, k, v)  # as RoPE makes it


def test_autocast_casts_queries_keys_and_values_but_not_slopes(interpreted):
    dtype, grad, error = interpreted(autocast_dtypes)[0]
    assert dtype == torch.bfloat16
    assert grad == torch.float32
    assert error < 3e-2


def addresses(world, layout):
    """Addresses of q, k, v: those of the inputs, and those that the forward kernel reads."""
    q, k, v, *_ = tensors_of(DEFAULT | dict(layout=layout, heads=(4, 2)))
    read = []

    def recording_launch(pass_name, tensors, *args):
        read.extend(tensors[name].data_ptr() for name in "qkv")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", recording_launch)
        kernels.flash_attention(q, k, v)
    return [q.data_ptr(), k.data_ptr(), v.data_ptr()], read


@pytest.mark.parametrize("layout", ["fused", "cache"])
def test_strided_inputs_are_not_copied(layout, interpreted):
    """Views of one fused tensor, and of a longer cache."""
    given, read = interpreted(addresses, layout)[0]
    assert read == given


def tuned(world):
    """What --tune prints if the first row does not fit, and the third is the fastest."""
    import contextlib
    import io

    rows = launch_table.candidates()[:3]
    clock = itertools.cycle([None, 2.0, 1.0, 3.0])

    def time_of(function):
        function()
        if milliseconds := next(clock):
            return milliseconds
        raise RuntimeError("out of resource: shared memory")

    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(said),
    ):
        patch.setattr(launch_table, "candidates", lambda: rows)
        patch.setattr(kernels.triton.testing, "do_bench", time_of)
        kernels.tune(torch.device("cpu"), head_dims=(64,), T=16, H=1)
    return rows, printed.getvalue(), said.getvalue()


@pytest.mark.slow
def test_tuning_prints_rows_to_paste_and_skips_those_that_do_not_fit(interpreted):
    (unfit, _, fastest), text, said = interpreted(tuned)[0]
    rows = eval("[" + "".join(line for line in text.splitlines() if line[0] == " ") + "]")
    assert rows == [("cpu", 64, *[fastest] * 3)]
    assert text.count("takes 1.000 ms, the row of the table 3.000") == 3
    assert said.count(f"{unfit}: RuntimeError") == 3


# --- bad input


def refusals(world):
    """{part of the message: the message} for inputs that are refused."""
    q = torch.randn(2, 4, 8, 16)
    wide = torch.randn(1, 1, 8, 160)
    ids = torch.zeros(2, 8, dtype=torch.long)
    short = q[:, :, :6]
    changes = {
        "4 query heads are not a multiple of 3": dict(k=q[:, :3], v=q[:, :3]),
        "needs q (B, H, Tq, D)": dict(k=q[0], v=q[0]),
        "all bf16, fp16 or fp32": dict(k=q.bfloat16()),
        "head dims up to 128, not 160: use attn_impl=sdpa": dict(q=wide, k=wide, v=wide),
        "alibi_slopes must be (4,) fp32 on cpu, not (3,)": dict(alibi_slopes=torch.ones(3)),
        "no gradient": dict(alibi_slopes=torch.ones(4, requires_grad=True)),
        "sequence_ids must be integers (2, 8)": dict(sequence_ids=ids[:, :7]),
        "no more queries than keys": dict(k=short, v=short, sequence_ids=ids[:, :6]),
        "a window only with causal=True": dict(window=3, causal=False),
    }
    messages = {}
    for part, change in changes.items():
        arguments = dict(q=q, k=q, v=q) | change
        qkv = [arguments.pop(name) for name in "qkv"]
        try:
            kernels.flash_attention(*qkv, **arguments)
            messages[part] = "no error"
        except ValueError as error:
            messages[part] = str(error)
    return messages


def test_bad_input_is_a_value_error_that_says_what_to_do(interpreted):
    messages = interpreted(refusals)[0]
    assert len(messages) == 9
    for part, message in messages.items():
        assert part in message
        assert "\n" not in message


def test_a_cpu_tensor_without_the_interpreter_is_refused():
    assert os.environ.get("TRITON_INTERPRET") != "1"
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(UserError, match="use attn_impl=sdpa or blocks, or set TRITON_INTERPRET=1"):
        attention(q, q, q, impl="triton")
    with pytest.raises(UserError, match="attn_pdrop=0"):
        attention(q, q, q, impl="triton", dropout_p=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be tuned for")
def test_tuning_needs_a_gpu():
    assert "there is none here" in refusal(kernels.main, ["--tune"])


# --- small pieces


WIDTHS = {8: (16, 0), 16: (16, 0), 17: (32, 0), 48: (32, 16), 64: (64, 0), 72: (64, 16)}
WIDTHS |= {80: (64, 16), 96: (64, 32), 100: (128, 0), 112: (128, 0), 128: (128, 0)}


@pytest.mark.parametrize("head_dim, widths", WIDTHS.items())
def test_a_head_is_held_with_little_waste(head_dim, widths):
    assert kernels.split(head_dim) == widths


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("causal, window, softcap", [(False, None, 1.0), (True, 3, None)])
def test_the_obvious_version_is_that_of_the_model(documents, causal, window, softcap):
    case = DEFAULT | dict(lengths=(7, 12), D=8, heads=(4, 2), documents=documents)
    q, k, v, slopes, ids, _ = tensors_of(case)
    q, k, v = (x.double() for x in (q, k, v))
    more = dict(alibi_slopes=slopes, causal=causal, softmax_scale=0.3, sequence_ids=ids)
    more |= dict(window=window, softcap=softcap)
    models = attention(q, k, v, impl="reference", **more)
    assert (kernels.reference_attention(q, k, v, **more) - models).abs().max() < 1e-12


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if not c.get("row")], ids=name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_the_device(case, dtype):
    errors = errors_of(case | dict(dtype=dtype), "cuda")
    assert max(errors) < LIMITS[dtype], errors


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_a_hundred_runs_on_the_device_are_equal_to_the_bit(D):
    case = DEFAULT | dict(
        lengths=(1000, 1000), heads=(8, 2), D=D, batch=4, dtype="bfloat16", documents=True
    )
    tensors = tensors_of(case, "cuda")
    first = run(case, tensors)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case, tensors), strict=True))
