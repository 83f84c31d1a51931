"""tensor_parallel.py on real gloo ranks: however the layers are cut, training is the same."""

import functools
import itertools
import math
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_parallel import Count
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import checkpoint
import fsdp_train
import parallel
import processes
import tensor_parallel
from config import MPTConfig, TrainConfig, UserError
from loss import IGNORE
from model import MPT, Positions, initial_weight
from storage.checkpoint_files import read_metadata
from tensor_parallel import Layout

# A vocabulary of 99 cannot be cut into equal parts.
MODEL = MPTConfig(
    d_model=32, n_heads=4, n_layers=3, vocab_size=99, max_seq_len=16, alibi=True, kv_n_heads=4
)
RUN = TrainConfig(
    global_batch_size=8,
    microbatch_size=2,
    max_steps=20,
    warmup_steps=2,
    lr=2e-3,
    decoupled_weight_decay=1e-4,
    sharding="ZERO1",
)
STEPS = 10
SEPARATOR = 5  # the id that ends a document, with attn_uses_sequence_id


@functools.cache
def team_of(tp, pp=1):
    """In a rank's process: its world as a grid. Each grid makes groups: keep them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return processes.in_grid(processes.World(rank, size, rank, size, torch.device("cpu")), tp, pp)


def rows_of_step(step, cfg, model_cfg):
    """The whole batch, (B, T + 1); some labels do not count, more in some rows than in others."""
    generator = torch.Generator().manual_seed(step)
    shape = cfg.global_batch_size, model_cfg.max_seq_len + 1
    rows = torch.randint(0, model_cfg.vocab_size, shape, generator=generator)
    rows[: cfg.global_batch_size // 3, -1] = IGNORE  # of a label: it is no input
    return rows


def take_steps(model, optimizer, steps, world, cfg, model_cfg, precision="fp32"):
    """[(loss, gradient norm), ...]"""
    curve = []
    for step in steps:
        rows = rows_of_step(step, cfg, model_cfg).chunk(world.dp_size)[world.dp_rank]
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, precision)
        curve.append((loss.item(), norm.item()))
    return curve


def curve_of(job, precision="fp32", steps=STEPS):
    """The curve of (model settings, settings) on the ranks of this process's group."""
    model_cfg, cfg = job
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(model_cfg, cfg, world, precision, cfg.seed)
    model.separator = SEPARATOR
    return take_steps(model, optimizer, range(steps), world, cfg, model_cfg, precision)


def curves(_, jobs, precision="fp32", steps=STEPS):
    return [curve_of(job, precision, steps) for job in jobs]


def alone(jobs):
    """The same settings for one process."""
    one = {"tp": 1, "pp": 1, "sequence_parallel": False}
    return [(model_cfg, replace(cfg, **one)) for model_cfg, cfg in jobs]


def largest_differences(found, wanted):
    """(of the losses, of the gradient norms) over the steps, relative to what is wanted."""
    pairs = list(zip(found, wanted, strict=True))
    assert all(math.isfinite(value) for pair in pairs for row in pair for value in row)
    losses, norms = (max(abs(ours[i] / theirs[i] - 1) for ours, theirs in pairs) for i in (0, 1))
    return losses, norms


def check(ranks, size, jobs, precision="fp32", of_loss=5e-6, of_norm=1e-5, steps=STEPS):
    """Each job on `size` ranks has the curve of one process."""
    of_ranks = ranks(size)(curves, jobs, precision, steps)
    (wanted,) = ranks(1)(curves, alone(jobs), precision, steps)
    for number, job in enumerate(jobs):
        for of_rank in of_ranks:
            losses, norms = largest_differences(of_rank[number], wanted[number])
            assert losses < of_loss and norms < of_norm, (job, losses, norms)


# --- The same curve as one process


@pytest.mark.parametrize("size, tp", [(2, 2), (4, 2), (4, 4)])
def test_tensor_ranks_train_as_one_process(ranks, size, tp):
    check(ranks, size, [(MODEL, replace(RUN, tp=tp))])


OPTIONS = {
    "sharding": ["FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "DDP", "HYBRID_SHARD"],
    "sequence_parallel": [False, True],
    "positions": [{"alibi": True}, {"alibi": False, "rope": True}, {"alibi": False}],
    "kv_n_heads": [4, 2, 1],
    "tie_word_embeddings": [True, False],
    "no_bias": [True, False],
    "qk_ln": [False, True],
    "activation_checkpointing": ["none", "selective", "full"],
    "z_loss": [0.0, 1e-3],
    "logit_scale": [None, 0.5],
    "attn_impl": ["reference", "blocks", "sdpa"],
    "tp": [2, 4],
}


def covering_set(options, possible):
    """Settings in which every two values of two options occur together, chosen greedily.

    possible(case): whether the values {option: value} can be together. Other options may follow.
    """
    names = list(options)

    def fits(chosen):
        return possible(case_of(chosen, options))

    missing = set()
    for a, b in itertools.combinations(range(len(names)), 2):
        sizes = len(options[names[a]]), len(options[names[b]])
        pairs = {((a, i), (b, j)) for i in range(sizes[0]) for j in range(sizes[1])}
        missing |= {pair for pair in pairs if fits(dict(pair))}
    cases = []
    while missing:
        (first, second), chosen = min(missing), {}
        chosen[first[0]], chosen[second[0]] = first[1], second[1]
        for number in range(len(names)):
            if number not in chosen:
                values = range(len(options[names[number]]))
                values = [v for v in values if fits(chosen | {number: v})]
                chosen[number] = max(
                    values, key=lambda v: newly_covered(number, v, chosen, missing)
                )
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        cases.append(case_of(chosen, options))
    return cases


def case_of(chosen, options):
    """{option: value} of {number of the option: number of its value}."""
    names = list(options)
    return {names[number]: options[names[number]][value] for number, value in chosen.items()}


def possible(case):
    """Two heads of keys are not cut in four. On four ranks only tp 2 leaves data-parallel ranks."""
    is_tp_4 = case.get("tp") == 4
    return not (is_tp_4 and (case.get("kv_n_heads") == 2 or case.get("sharding", "DDP") != "DDP"))


def newly_covered(number, value, chosen, missing):
    """How many missing pairs this value makes with those that are chosen."""
    pairs = [tuple(sorted([(number, value), other])) for other in chosen.items()]
    return sum(pair in missing for pair in pairs)


def settings(case, model_cfg=MODEL):
    """(model settings, settings) of a case of the covering set."""
    case = dict(case)
    model_cfg = replace(model_cfg, **case.pop("positions"))
    of_run = {name: case.pop(name) for name in list(case) if hasattr(RUN, name)}
    return replace(model_cfg, **case), replace(RUN, **({"shard_size": 2} | of_run))


def check_cover(cases, options, possible):
    """Every possible pair of values is in a case, and no other."""
    for a, b in itertools.combinations(options, 2):
        for x, y in itertools.product(options[a], options[b]):
            covered = any(case[a] == x and case[b] == y for case in cases)
            assert covered == possible({a: x, b: y}), (a, x, b, y)


def test_the_covering_set_covers_every_pair():
    check_cover(covering_set(OPTIONS, possible), OPTIONS, possible)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_two_options_together_train_as_one_process(ranks, part):
    jobs = [settings(case) for case in covering_set(OPTIONS, possible)[part::4]]
    check(ranks, 4, jobs)


@pytest.mark.slow
def test_in_bf16_the_curve_is_that_of_bf16(ranks):
    jobs = [(MODEL, replace(RUN, tp=2, sequence_parallel=sp)) for sp in (False, True)]
    check(ranks, 2, jobs, "bf16", of_loss=2e-3, of_norm=2e-2)


def gradients_in_float64(_, job):
    """(loss, [(name, corner in the whole tensor, gradient), ...]) of this rank."""
    model_cfg, cfg = job
    world = team_of(cfg.tp)
    model, _ = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    model.double()
    rows = rows_of_step(0, cfg, model_cfg)
    loss = model(rows[:, :-1], labels=rows[:, 1:], z_loss=cfg.z_loss)
    loss.backward()
    tensor_parallel.sum_partial_gradients(model)
    layout = tensor_parallel.layout_of(model)
    found = []
    for name, param in model.named_parameters():
        found += [(name, corner, piece) for corner, piece in layout.pieces(name, param.grad)]
    return loss.item(), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"alibi": False, "rope": True, "qk_ln": True},
        {"no_bias": False, "tie_word_embeddings": False, "alibi": False},
        {"kv_n_heads": 2, "logit_scale": 0.5, "attn_impl": "reference", "clip_qkv": 0.5},
        {"kv_n_heads": 1, "qk_ln": True, "no_bias": False},
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_in_float64_nothing_but_the_order_of_sums_differs(ranks, changes, sequence_parallel):
    cfg = replace(RUN, tp=2, sequence_parallel=sequence_parallel, z_loss=1e-3)
    job = replace(MODEL, **changes), cfg
    ((wanted, whole),) = ranks(1)(gradients_in_float64, *alone([job]))
    whole = {name: grad for name, _, grad in whole}
    for loss, pieces in ranks(2)(gradients_in_float64, job):
        assert loss == pytest.approx(wanted, rel=1e-12)
        for name, corner, piece in pieces:
            place = tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True))
            error = (piece - whole[name][place]).norm() / whole[name].norm().clamp(min=1)
            assert error < 1e-9, (name, corner)


# --- Parts of a whole


VARIANTS = [
    {},
    {"kv_n_heads": 1, "qk_ln": True},
    {"tie_word_embeddings": False, "alibi": False, "no_bias": False, "expansion_ratio": 3},
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("changes", VARIANTS)
def test_the_parts_of_all_ranks_are_the_whole(changes, tp):
    model_cfg = replace(MODEL, **changes)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in MPT(model_cfg).named_parameters()}
    for name, shape in shapes.items():
        whole = torch.arange(shape.numel()).view(shape)
        n_ranks = torch.zeros(shape, dtype=torch.long)  # that have an element
        is_shared = torch.zeros(shape, dtype=torch.bool)
        counted = 0
        for rank in range(tp):
            layout = Layout(model_cfg, rank, tp)
            part = layout.take(name, whole)
            assert layout.whole_shape(name, part.shape) == shape
            counted += sum(view.sum() for view in layout.counted(name, part))
            for corner, piece in layout.pieces(name, part):
                place = tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True))
                assert torch.equal(whole[place], piece)
                n_ranks[place] += 1
                is_shared[place] = layout.is_shared(name, corner)
        assert torch.equal(n_ranks, torch.where(is_shared, tp, 1)), name
        assert counted == whole.sum(), name  # each element once


def initial_weights_fit(_, cfg):
    """Whether each piece of a sharded part is that of the whole initial weight, bit by bit."""
    world = team_of(cfg.tp, cfg.pp)
    model, _ = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    layout = tensor_parallel.layout_of(model)
    for name, param in model.named_parameters():
        whole = initial_weight(name, layout.whole_shape(name, param.shape), MODEL, cfg.seed)
        for corner, piece in layout.pieces(name, param.detach()):
            place = [slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True)]
            if not torch.equal(whole[tuple(place)], piece):
                return name
    return ""


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "DDP"])
def test_initial_weights_are_those_of_one_process(ranks, sharding):
    assert ranks(4)(initial_weights_fit, replace(RUN, tp=2, sharding=sharding)) == [""] * 4


# --- Chunks of the loss


def loss_and_scores_in_chunks(_, cfg):
    """Of one rank's model, whose part of the vocabulary would allow another chunk than others."""
    world = team_of(cfg.tp)
    with mock.patch("loss.CHUNK_BYTES", 4 * 49 * 8):  # 8 rows of 49 logits, 7 of 50
        model, _ = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
        rows = rows_of_step(0, cfg, MODEL)
        loss = model(rows[:, :-1], labels=rows[:, 1:])
        loss.backward()
        model.eval()
        labels = rows[:, 1:]
        log_probs, _ = model(rows[:, :-1], labels=labels, score=True)
    return loss.item(), parallel.grad_norm(model).item(), log_probs.sum().item()


def test_all_ranks_cut_the_loss_into_the_same_chunks(ranks):
    """99 ids: one rank has 49 of them, the other 50."""
    (wanted,) = ranks(1)(loss_and_scores_in_chunks, RUN)
    for found in ranks(2)(loss_and_scores_in_chunks, replace(RUN, tp=2)):
        assert found == pytest.approx(wanted, rel=1e-5)


def loss_of_label(_, cfg, label):
    """The loss of a batch with this label."""
    world = team_of(cfg.tp)
    model, _ = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    rows = rows_of_step(0, cfg, MODEL)
    labels = rows[:, 1:].clone()
    labels[0, 0] = label
    return model(rows[:, :-1], labels=labels).item()


def test_a_label_beyond_the_vocabulary_is_noticed(ranks):
    assert all(map(math.isnan, ranks(2)(loss_of_label, replace(RUN, tp=2), 99)))
    assert all(map(math.isfinite, ranks(2)(loss_of_label, replace(RUN, tp=2), 98)))


# --- What goes over the wire


def all_reduces_of_a_microbatch(_, cfg):
    """How many all-reduces of the team one forward and backward takes."""
    world = team_of(cfg.tp)
    model, _ = parallel.build(MODEL, cfg, world, "fp32", cfg.seed)
    rows = rows_of_step(0, cfg, MODEL)[:2]
    calls = []
    real = dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted):
        model(rows[:, :-1], labels=rows[:, 1:]).backward()
    return len(calls)


def test_a_layer_takes_four_all_reduces(ranks):
    """Besides: the embedding, the loss's input, and two for each of its chunks, here one."""
    wanted = 4 * MODEL.n_layers + 1 + 1 + 2
    assert ranks(2)(all_reduces_of_a_microbatch, replace(RUN, tp=2)) == [wanted] * 2


KINDS = ("_allgather", "_reduce_scatter", "allreduce")


def collectives_of_a_step(_, cfgs):
    """[(all-gathers, reduce-scatters, all-reduces of a step), ...]"""
    model_cfg, found = replace(MODEL, n_layers=5), []
    for cfg in cfgs:
        world = team_of(cfg.tp)
        model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
        with Count() as count:
            take_steps(model, optimizer, [0], world, cfg, model_cfg)
        calls = list(count.operators.elements())  # "c10d::_allgather_base_" and the like
        found.append([sum(call.startswith(f"c10d::{kind}") for call in calls) for kind in KINDS])
    return found


@pytest.mark.slow
def test_a_step_has_as_many_collectives_as_its_sharding_needs(ranks):
    """Five blocks and the root are six units; each rank has four microbatches."""
    modes = ["ZERO1", "SHARD_GRAD_OP", "FULL_SHARD", "DDP"]
    cfgs = [replace(RUN, tp=2, sharding=mode, microbatch_size=1) for mode in modes]
    of_team = 4 * (4 * 5 + 4)  # of a microbatch: four a layer, and four for embedding and loss
    of_step = 4  # tokens, loss, and the norm over the shards and over the team
    reduces = of_team + of_step
    wanted = [
        [6, 6, reduces],
        [24, 24, reduces],
        [44, 24, reduces],
        [0, 0, reduces + 6],
    ]
    for found in ranks(4)(collectives_of_a_step, cfgs):
        assert found == wanted


# --- Dropout


def masks(_, cfg, model_cfg):
    """(the weights that all ranks have, after three steps with dropout; this rank's losses)"""
    world = team_of(cfg.tp)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    curve = take_steps(model, optimizer, range(3), world, cfg, model_cfg)
    whole = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if not model.layout.spans(name)
    }
    return whole, curve


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_dropout_the_whole_tensors_stay_equal_on_all_tensor_ranks(ranks, sequence_parallel):
    model_cfg = replace(MODEL, resid_pdrop=0.2, emb_pdrop=0.1, attn_pdrop=0.2, no_bias=False)
    cfg = replace(RUN, tp=2, sequence_parallel=sequence_parallel)
    (first, first_curve), (second, second_curve) = ranks(2)(masks, cfg, model_cfg)
    assert first_curve == second_curve
    assert all(torch.equal(first[name], second[name]) for name in first)


def first_block_input(model, ids):
    seen = []
    handle = model.transformer.blocks[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach())
    )
    model(ids)
    handle.remove()
    return seen[0]


def dropped_inputs(_, cfg):
    """Where dropout has set the input of the first block to 0, on one rank."""
    world = team_of(cfg.tp)
    model, _ = parallel.build(replace(MODEL, emb_pdrop=0.5), cfg, world, "fp32", cfg.seed)
    parallel.seed_dropout(cfg, 0, world)
    return first_block_input(model, torch.zeros(2, MODEL.max_seq_len, dtype=torch.long)) == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_drop_the_same_of_what_all_of_them_have(ranks, sequence_parallel):
    """With sequence parallelism each has its own tokens, and drops others."""
    cfg = replace(RUN, tp=2, sequence_parallel=sequence_parallel)
    first, second = ranks(2)(dropped_inputs, cfg)
    assert torch.equal(first, second) != sequence_parallel


def dropped(_, cfg):
    """What attention makes of equal heads with half of its weights dropped, (B, T, D / n)."""
    world = team_of(cfg.tp)
    model_cfg = replace(MODEL, attn_pdrop=0.5, alibi=False, attn_impl="reference")
    attn = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)[0].transformer.blocks[0].attn
    seen = []
    attn.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        attn.Wqkv.weight.fill_(0.1)
        torch.manual_seed(0)
        attn(torch.randn(2, 8, MODEL.d_model), Positions())
    return seen[0]


def test_each_tensor_rank_drops_other_attention_weights(ranks):
    first, second = ranks(2)(dropped, replace(RUN, tp=2))
    assert not torch.equal(first, second)


# --- Evaluation and scoring


def evaluated(_, cfg, model_cfg):
    """(logits, loss, log-probabilities, greedy) of a model in evaluation."""
    world = team_of(cfg.tp)
    model, _ = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    model.eval()
    rows = rows_of_step(0, cfg, model_cfg)[:3, :14]  # without its last column
    with torch.no_grad():
        ids, labels = rows[:, :-1], rows[:, 1:]
        logits = model(ids)
        return logits, model(ids, labels=labels), *model(ids, labels=labels, score=True)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_and_scores_are_those_of_one_process(ranks, size):
    ((logits, loss, log_probs, greedy),) = ranks(1)(evaluated, RUN, MODEL)
    cfg = replace(RUN, tp=size, sequence_parallel=True)  # 13 tokens do not divide
    for found in ranks(size)(evaluated, cfg, MODEL):
        torch.testing.assert_close(found[0], logits, atol=1e-5, rtol=0)
        assert found[1].item() == pytest.approx(loss.item(), abs=1e-4)
        torch.testing.assert_close(found[2], log_probs, atol=1e-5, rtol=0)
        assert torch.equal(found[3], greedy)


# --- Checkpoints


def save(_, cfg, folder, model_cfg=MODEL):
    """Three steps, then a checkpoint. Returns the names of tensors that differ from it."""
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", cfg.seed)
    take_steps(model, optimizer, range(3), world, cfg, model_cfg)
    saver = checkpoint.Checkpointer(folder, world.device, keep_last=1)
    meta = asdict(model_cfg) | asdict(cfg) | {"data_fingerprint": "of no data"}
    saver.save(3, model, optimizer, meta)
    saver.finish()
    return unlike(checkpoint.latest(folder), model, optimizer)


def load_and_continue(_, cfg, path, model_cfg=MODEL):
    """(names of tensors that differ from the whole ones of the checkpoint, the next losses)"""
    world = team_of(cfg.tp, cfg.pp)
    model, optimizer = parallel.build(model_cfg, cfg, world, "fp32", seed=None)
    checkpoint.load(path, model, optimizer)
    wrong = unlike(path, model, optimizer)
    return wrong, take_steps(model, optimizer, range(3, 5), world, cfg, model_cfg)


def unlike(path, model, optimizer):
    """The names of a rank's tensors that are not bit-equal to their places in a checkpoint."""
    whole = {}
    for key, entry in read_metadata(path).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            whole[key] = torch.full(entry.size, torch.nan)
    checkpoint.fill(path, whole)
    layout = tensor_parallel.layout_of(model)
    wrong = []
    for part, tensors in checkpoint.state_of(model, optimizer).items():
        for key, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                continue
            pieces = [((), value)]  # of a scalar
            if value.dim():
                pieces = layout.pieces(checkpoint.name_of_param(f"{part}.{key}"), value.detach())
            for corner, piece in pieces:
                place = [slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True)]
                if not torch.equal(whole[f"{part}.{key}"][tuple(place)], piece):
                    wrong.append(key)
    return wrong


LAYOUTS = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 x dp2": (4, {"tp": 2, "sharding": "FULL_SHARD"}),
    "tp2 + sequence": (2, {"tp": 2, "sequence_parallel": True}),
}


def test_one_process_loads_what_two_tensor_ranks_saved(ranks, tmp_path):
    """Every weight and moment: its next losses are those of a run that never stopped."""
    assert ranks(2)(save, replace(RUN, tp=2), str(tmp_path)) == [[], []]
    ((wrong, curve),) = ranks(1)(load_and_continue, RUN, tmp_path / "checkpoints/step-3")
    ((wanted,),) = ranks(1)(curves, [(MODEL, RUN)])
    assert not wrong
    losses, norms = largest_differences(curve, wanted[3:5])
    assert losses < 5e-6 and norms < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_checkpoint_loads_in_any_layout(ranks, tmp_path, saved):
    size, changes = LAYOUTS[saved]
    assert not any(ranks(size)(save, replace(RUN, **changes), str(tmp_path)))
    path = tmp_path / "checkpoints/step-3"
    ((wrong, wanted),) = ranks(1)(load_and_continue, RUN, path)
    assert not wrong
    names = list(LAYOUTS)
    for step in (1, 2, 3):
        size, changes = LAYOUTS[names[(names.index(saved) + step) % len(names)]]
        for wrong, curve in ranks(size)(load_and_continue, replace(RUN, **changes), path):
            assert not wrong
            losses, norms = largest_differences(curve, wanted)
            assert losses < 5e-6 and norms < 1e-5


# --- Bad input


@pytest.mark.parametrize(
    "changes, model_changes, words",
    [
        ({"tp": 3}, {}, "tp 3 does not divide n_heads 4: tp can be 1, 2, 4"),
        ({"tp": 4}, {"kv_n_heads": 2}, "tp 4 does not divide kv_n_heads 2: tp can be 1, 2"),
        ({"tp": 2, "compile": True}, {}, "set --compile=False"),
        ({"sequence_parallel": True}, {}, "set --tp=2"),
        ({"tp": 2, "sequence_parallel": True}, {"max_seq_len": 15}, "max_seq_len 15"),
    ],
)
def test_what_cannot_be_cut_is_a_user_error(changes, model_changes, words):
    with pytest.raises(UserError, match=words):
        tensor_parallel.check(replace(MODEL, **model_changes), replace(RUN, **changes))


def test_ranks_that_form_no_teams_are_a_user_error():
    world = processes.World(0, 3, 0, 3, torch.device("cpu"))
    with pytest.raises(UserError, match="3 ranks do not form teams of tp 2"):
        processes.in_grid(world, 2)
