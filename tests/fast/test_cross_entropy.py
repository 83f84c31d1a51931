"""cross_entropy.py in Triton's interpreter, against autograd in float64; compiled for chips.

The interpreter is chosen when a kernel is decorated, so the kernels run in other processes: those
of the fixture `interpreted`.
"""

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton: see requirements-dev.txt")

from test_launch_table import SHARED, USUAL_CHIPS  # noqa: E402

import loss as loss_file  # noqa: E402
from fast import cross_entropy as kernels  # noqa: E402
from loss import IGNORE  # noqa: E402
from program import UserError  # noqa: E402

# The interpreter truncates to bf16, where a GPU rounds.
GRADIENT_LIMITS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
DEFAULT = dict(rows=7, vocab=300, dtype="float32", scale=1.0, z_loss=0.0, ignored=0.3, size=3.0)
CASES = [{}, dict(scale=0.25), dict(z_loss=0.1), dict(scale=0.5, z_loss=0.01)]
CASES += [dict(vocab=vocab, z_loss=0.01) for vocab in (1, 5, 4095, 4096, 4097, 9001)]
CASES += [dict(rows=1), dict(ignored=0.0), dict(ignored=1.1), dict(size=300.0)]
CASES += [dict(dtype=dtype, scale=0.5, z_loss=0.01) for dtype in ("float16", "bfloat16")]
CASES += [dict(dtype="bfloat16", vocab=9001, size=30.0)]


def name(case) -> str:
    """A test id."""
    return "-".join(f"{k}={v}" for k, v in case.items()) or "plain"


def inputs(case):
    """logits (rows, vocab) and labels (rows,), a share of which do not count."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = case["rows"], case["vocab"]
    logits = case["size"] * torch.randn(rows, vocab, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < case["ignored"]] = IGNORE
    return logits.to(getattr(torch, case["dtype"])), labels


def by_hand(case, logits, labels):
    """(losses, log_z, gradient by the scaled logits), in fp64, with autograd."""
    s = (case["scale"] * logits.double()).requires_grad_()
    log_z = torch.logsumexp(s, 1)
    label_logits = s[torch.arange(len(s)), labels.clamp(min=0)]
    losses = log_z - label_logits + case["z_loss"] * log_z**2
    losses = losses.masked_fill(labels == IGNORE, 0)
    (grad,) = torch.autograd.grad(losses.sum(), s)
    return losses.detach(), log_z.detach(), grad


def errors(world, cases) -> dict:
    """{name of a case: (errors of losses, log_z and gradient; same; agrees)}.

    Errors are relative where values are above 1. same: whether both forms give the same, and only
    one writes to the logits. agrees: whether the obvious version equals the formula.
    """
    found = {}
    for case in cases[world.global_rank :: world.global_size]:
        settings = DEFAULT | case
        logits, labels = inputs(settings)
        exact = by_hand(settings, logits, labels)
        untouched = logits.clone()
        arguments = (labels, settings["scale"], settings["z_loss"])
        alone = kernels.cross_entropy(untouched, *arguments)
        same = torch.equal(untouched, logits)
        losses, log_z = kernels.cross_entropy_gradient_(logits, *arguments)
        same = same and torch.equal(alone[0], losses) and torch.equal(alone[1], log_z)
        results = []
        for a, b in zip((losses, log_z, logits), exact, strict=True):
            results.append(((a - b).abs().max() / b.abs().max().clamp(min=1)).item())
        obvious = kernels.reference_cross_entropy(untouched.double(), *arguments)
        agrees = all(torch.allclose(a, b, atol=1e-12) for a, b in zip(obvious, exact, strict=True))
        found[name(case)] = (results, same, agrees)
    return found


@pytest.fixture(scope="module")
def measured(interpreted):
    """{name of a case: its errors}; two processes share the cases."""
    first, second = interpreted(errors, CASES)
    return first | second


@pytest.mark.parametrize("case", CASES, ids=name)
def test_losses_and_gradients_equal_the_formula_in_fp64(case, measured):
    (loss_error, log_z_error, grad_error), same, obvious_agrees = measured[name(case)]
    assert same and obvious_agrees
    assert loss_error < 1e-6 and log_z_error < 1e-6
    assert grad_error < GRADIENT_LIMITS[case.get("dtype", "float32")]


def special_rows(world):
    """Losses and gradients of rows whose labels are outside of the vocabulary, or of one logit."""
    logits = torch.randn(5, 40)
    before = logits.clone()
    labels = torch.tensor([3, 40, -7, IGNORE, 2**40])
    losses, _ = kernels.cross_entropy_gradient_(logits, labels, 1.0, 0.0)
    row_in_a_wider_tensor = torch.full((3, 64), 7.0)
    row_in_a_wider_tensor[:, :40] = before[:3]
    view = row_in_a_wider_tensor[:, :40]
    wide = kernels.cross_entropy_gradient_(view, labels[:3].clamp(0, 39), 1.0, 0.0)
    outside = row_in_a_wider_tensor[:, 40:]
    empty = kernels.cross_entropy(logits[:0], labels[:0], 1.0, 0.0)[0]
    return losses, logits, wide[0].isfinite().all() and (outside == 7).all(), len(empty)


def test_a_label_outside_of_the_vocabulary_gives_nan_and_touches_nothing_else(interpreted):
    losses, grads, stays_inside, n_empty = interpreted(special_rows)[0]
    assert losses.isnan().tolist() == [False, True, True, False, True]
    assert grads.isnan().all(1).tolist() == [False, True, True, False, True]
    assert not grads[3].any() and losses[3] == 0
    assert stays_inside and n_empty == 0


# --- in the loss


def value_and_gradients(x, weight, labels, *args):
    """The loss and the gradients of x and weight."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    value = loss_file.linear_cross_entropy(*leaves, labels, *args)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def on_a_pretended_gpu(world, dtype, scale, z_loss):
    """Errors of the loss and its gradients with the kernel, and without a gradient, to fp64.

    Chunks do not divide the tokens. The CPU cannot add a 16-bit product to an fp32 matrix.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(53, 16), torch.randn(211, 16)
    labels = torch.randint(0, 211, (53,)).masked_fill(torch.rand(53) < 0.3, IGNORE)
    exact = value_and_gradients(x.double(), weight.double(), labels, scale, z_loss)
    x, weight = (t.to(getattr(torch, dtype)) for t in (x, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_file, "takes_kernel", lambda device, dtype: True)
        patch.setattr(kernels, "ADDS_IN_FP32", False)
        patch.setattr(loss_file, "CHUNK_BYTES", 4 * 211 * 20)
        found = value_and_gradients(x, weight, labels, scale, z_loss)
        with torch.no_grad():
            alone = loss_file.linear_cross_entropy(x, weight, labels, scale, z_loss)
    pairs = zip(found, exact, strict=True)
    relative = [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return relative, abs(alone - found[0]).item(), [t.dtype for t in found]


@pytest.mark.parametrize(
    "dtype, limit, scale, z_loss", [("float32", 1e-6, 0.25, 0.1), ("bfloat16", 2e-2, None, 0.0)]
)
def test_the_loss_of_a_gpu_is_that_of_a_cpu(interpreted, dtype, limit, scale, z_loss):
    errors, difference, dtypes = interpreted(on_a_pretended_gpu, dtype, scale, z_loss)[0]
    assert max(errors) < limit, errors
    assert difference == 0
    assert dtypes == [torch.float32, *[getattr(torch, dtype)] * 2]


def checked_by_pytorch(world):
    """torch.library.opcheck of both operators: schema, what they write to, shapes of the fakes."""
    logits, labels = torch.randn(3, 10), torch.tensor([1, IGNORE, 9])
    for operator in (kernels.cross_entropy, kernels.cross_entropy_gradient_):
        torch.library.opcheck(operator, (logits.clone(), labels, 0.5, 0.1))
    matrices = torch.randn(4, 5), torch.randn(4, 3), torch.randn(3, 5)
    torch.library.opcheck(kernels.add_product_, matrices)
    return True


@pytest.mark.slow
def test_pytorchs_own_checks_of_the_operators(interpreted):
    assert interpreted(checked_by_pytorch)[0]


@pytest.mark.parametrize(
    "lacking", ["nothing", "Triton or its compiler", "matrix instructions", "fp64", "GPU"]
)
def test_pytorchs_operators_run_where_the_kernel_cannot(lacking, monkeypatch):
    from fast import first_use

    monkeypatch.setattr(first_use, "can_build", lambda: lacking != "Triton or its compiler")
    has = lacking != "matrix instructions"
    monkeypatch.setattr(first_use.launch_table, "has_matrix_instructions", lambda arch: has)
    monkeypatch.setattr(first_use.launch_table, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(first_use, "is_right", lambda *_: True)
    device = torch.device("cpu" if lacking == "GPU" else "cuda")
    dtype = torch.float64 if lacking == "fp64" else torch.bfloat16
    assert loss_file.takes_kernel(device, dtype) == (lacking == "nothing")


def test_bad_input_is_one_line():
    logits, labels = torch.randn(3, 10), torch.zeros(3, dtype=torch.long)
    for part, arguments in {
        "not torch.float64: cast": (logits.double(), labels),
        r"not \(3, 10\) and \(2,\)": (logits, labels[:2]),
        "set TRITON_INTERPRET=1": (logits, labels),
    }.items():
        with pytest.raises(UserError, match=part):
            kernels.cross_entropy(*arguments, 1.0, 0.0)


# --- compiled for chips


def compiled_for(world, archs):
    """{(chip, dtype, writes the gradient): facts of the binary} of this process's chips."""
    import compiled

    found = {}
    for arch in archs[world.global_rank :: world.global_size]:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.empty(8, 50368, dtype=dtype)
            labels, results = torch.zeros(8, dtype=torch.long), torch.empty(8)
            arguments = logits, labels, results, results, logits.stride(0), 50368, 1.0, 0.0
            for writes in (True, False):
                with compiled.for_chip(arch) as binaries:
                    kernels.cross_entropy_kernel[(8,)](
                        *arguments,
                        WRITE_GRADIENT=writes,
                        BLOCK=kernels.BLOCK,
                        num_warps=kernels.NUM_WARPS,
                    )
                (binary,) = binaries.values()
                found[arch, str(dtype), writes] = compiled.facts(binary)
    return found


OTHER_CHIPS = [arch for arch in SHARED if arch not in USUAL_CHIPS]


@pytest.mark.parametrize(
    "archs",
    [
        pytest.param(USUAL_CHIPS, marks=pytest.mark.slow, id="usual chips"),
        pytest.param(OTHER_CHIPS, marks=pytest.mark.long, id="others"),
    ],
)
def test_it_spills_nothing_on_any_chip_and_each_thread_has_columns_of_its_own(ranks, archs):
    from compiled import warp_size

    first, second = ranks(2)(compiled_for, archs)
    found = first | second
    assert len(found) == 4 * len(archs)
    for (arch, *_), fact in found.items():
        assert fact.binary and fact.warp == warp_size(arch)
        assert fact.spilled == 0
        assert fact.shared <= SHARED[arch]
        assert 8 * kernels.NUM_WARPS * fact.warp <= kernels.BLOCK


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_the_device(dtype):
    errors = kernels.compare("cuda", getattr(torch, dtype), rows=500, vocab_size=50368)
    assert max(errors) < GRADIENT_LIMITS[dtype] * 10 and not any(map(math.isnan, errors))


@pytest.mark.gpu
def test_a_hundred_runs_on_the_device_are_equal_to_the_bit():
    logits = torch.randn(512, 50368, device="cuda").bfloat16()
    labels = torch.randint(0, 50368, (512,), device="cuda")
    results = []
    for _ in range(100):
        grad = logits.clone()
        results.append([*kernels.cross_entropy_gradient_(grad, labels, 1.0, 1e-4), grad])
    assert all(torch.equal(a, b) for run in results for a, b in zip(run, results[0], strict=True))
