"""What a run will need, how fast it will be and how it will scale, before you launch it.

    python plan.py configs/mpt7b.py --device=mi250 --devices=64 --network=100   one layout
    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,64,256     strong, weak scaling
    python plan.py --device=h100 --devices=64 --budget=7                        the best in a week
    python plan.py configs/lora_mpt7b.py --lora_rank=16 --device=4090 --devices=1      adapters
    python plan.py configs/mpt7b.py --device=h100,mi250 --price=2.5,1.2 --sweep_devices=8,64 --plot
                                                     time, cost and energy on two kinds of device
    python plan.py configs/mpt7b.py --machine=frontier --devices=64             its nodes, network
    python plan.py --plot                                                       pictures

What a config file or a flag sets is kept. What is `auto` or not set (tp, pp, sharding, microbatch,
activation checkpointing) is chosen: the fastest layout that fits, or with --simplest the fastest
with the least tensor and pipeline parallelism. --choose leaves all of it open. The flags launch the
plan; the table below it has the five fastest layouts, and what kinds of parallelism each needs. A
simpler one is named if it is slower by less than the error, and better batches if the batch rules
out data-parallel ranks.
Interleaved pipeline stages are planned only if you set --interleave: the trainer has none.

planning/search.py chooses, with the bytes of planning/memory.py and the seconds of
planning/step_time.py, whose constants were fitted to LLM Foundry's published MPT runs on A100 and
H100 of 2023; bench/results/planner.md has the error of every row. Any other device is extrapolated,
and the plan says so, until `--calibrate=FILE` brings measurements: a machine.json of `bench
machine`, a table of `bench train`, or a file in which planning/calibrate.py has put both. The last
lines of a plan list what was assumed.

Every figure that depends on the speed has an error band: how far published runs of this kind were
from their predictions. A plan of a kind of which too few were published says so, and has a wider
band (planning/certainty.py).
Prices are yours, of one torch device for an hour. With several kinds of device, a flag has one
value for all or one for each. `--json` prints any answer for programs.
"""

import json
from dataclasses import replace
from pathlib import Path

import config
import devices
import flops
from config import MPTConfig, TrainConfig, UserError, require
from planning import answer, budget, calibrate, memory, picture, search, step_time
from planning.answer import Offer, PlanArgs
from planning.budget import Training
from planning.fleet import Fleet, fleet_of, with_flags
from planning.search import LayoutArgs, Plan
from planning.step_time import Constants


def trainer(args: PlanArgs) -> step_time.Trainer:
    """The trainer that --trainer names."""
    return step_time.FOUNDRY if args.trainer == "foundry" else step_time.OURS


def fleet_and_constants(args: PlanArgs) -> tuple[Fleet, Constants]:
    """The devices and the constants of step_time.py, measured if --calibrate has a file."""
    fleet = fleet_of(args, interleave=args.interleave)
    if not args.calibrate:
        return fleet, Constants()
    fleet, c = calibrate.from_file(args.calibrate, fleet, trainer(args))
    return with_flags(fleet, args), c


def plan_of_settings(
    m: MPTConfig, cfg: TrainConfig, args: PlanArgs, fleet: Fleet, c: Constants
) -> Plan | None:
    """What fsdp_train.py would run with these settings; None if some are auto or it cannot."""
    if "auto" in (getattr(cfg, name) for name in search.OPEN):
        return None
    in_groups = cfg.sharding_mode.over == "group"
    shard_size = cfg.shard_size or (fleet.node_size if in_groups else 0)
    try:
        fleet = replace(fleet, tp=cfg.tp, pp=cfg.pp)
        return search.evaluate(m, replace(cfg, shard_size=shard_size), fleet, c, trainer(args))
    except UserError:  # the model or the batch cannot be split over these devices
        return None


def device_counts(args: PlanArgs) -> list[int]:
    """The numbers of --sweep_devices, sorted, or --devices alone. Raises UserError."""
    if not args.sweep_devices:
        return [args.devices]
    counts = [config.parse_number(text) for text in args.sweep_devices.split(",")]
    are_whole = all(isinstance(n, int) for n in counts)
    example = "expected whole numbers, such as 8,16,64"
    require(are_whole, f"--sweep_devices={config.shown(args.sweep_devices)}: {example}")
    for n in counts:
        config.check_range("devices", n)
    return sorted(set(counts))


def require_one_question(args: PlanArgs, cfg: TrainConfig, files: list[str], given: set) -> None:
    """UserError if the settings contradict the question. given: names of the flags."""
    fix = "remove --precision=fp32"
    require(cfg.precision != "fp32", f"plans are for bf16, in which speeds were published: {fix}")
    of_a_budget = ("tokens", "max_steps", *budget.SHAPE)
    found_by_budget = [f"--{name}" for name in of_a_budget if name in given]
    all_train = not (args.budget and cfg.lora_rank)
    require(all_train, "--budget finds a model to train from scratch: remove --lora_rank")
    if args.budget and (files or found_by_budget):
        extra = " ".join(files + found_by_budget)
        raise UserError(f"--budget finds the model and its tokens: remove {extra}")


def require_one_length(m: MPTConfig, cfg: TrainConfig, args: PlanArgs) -> None:
    """UserError if --tokens and --max_steps are two lengths of a run."""
    batch = args.global_batch_size or budget.default_batch(cfg, args.devices)
    steps = args.tokens / (batch * m.max_seq_len)
    same = f"--tokens={args.tokens:g} are {steps:,.6g} steps of {batch} x {m.max_seq_len} tokens"
    problem = f"{same}, not --max_steps={args.max_steps}: remove one of the two"
    require(not args.tokens or abs(steps - args.max_steps) <= 1, problem)


def require_calibration(args: PlanArgs) -> None:
    """UserError if --calibrate names no file."""
    kinds = "a machine.json of `bench machine`, or a file of planning.calibrate --save"
    fix = f"name a table (.csv) of `bench train`, {kinds}"
    problem = f"no file {args.calibrate!r} to calibrate with: {fix}"
    require(not args.calibrate or Path(args.calibrate).is_file(), problem)


def with_defaults(
    m: MPTConfig, cfg: TrainConfig, args: PlanArgs
) -> tuple[MPTConfig, TrainConfig, PlanArgs]:
    """The settings with fused attention, the tokens of --max_steps, and a global batch."""
    if m.attn_impl != "triton":
        m = replace(m, attn_impl="sdpa")
    if not args.global_batch_size:
        cfg = replace(cfg, global_batch_size=budget.default_batch(cfg, args.devices))
    if not args.tokens and (args.max_steps or cfg.lora_rank):
        args = replace(args, tokens=answer.tokens_of_steps(m, cfg))
    return m, cfg, args


def question(
    argv: list[str],
) -> tuple[MPTConfig, TrainConfig, LayoutArgs, PlanArgs, list[str]]:
    """The settings that argv asks about, and its config files. UserError if they contradict."""
    for word in argv:
        if flops.flag_name(word) == "devices" and "," in word:
            fix = f"--sweep_devices={word.partition('=')[2]} plans for several"
            raise UserError(f"{word}: expected one number, such as --devices=64; {fix}")
    classes = (MPTConfig, TrainConfig, LayoutArgs, PlanArgs)
    m, cfg, asked, args = config.load(memory.with_base(argv), *classes)
    files = [text for text in argv if not text.startswith("-")]
    given = {flops.flag_name(text) for text in argv}
    require_one_question(args, cfg, files, given)
    if {"tokens", "max_steps"} <= given:
        require_one_length(m, cfg, args)
    require_calibration(args)
    if args.calibrate and args.device in devices.THIS_MACHINE and not args.machine:
        args = replace(args, device=calibrate.device_of(args.calibrate))
    if args.choose:
        left_open = [name for name in search.OPEN if name not in given]
        asked = replace(asked, **dict.fromkeys(left_open, "auto"))
    return m, cfg, asked, args, files


def main(argv: list[str]) -> None:
    """Answer the question that the config files and flags in argv ask."""
    kinds = answer.split_kinds(argv)
    if len(kinds) > 1:
        return compare(kinds)
    m, cfg, asked, args, files = question(argv)
    nothing_asked = {flops.flag_name(text) for text in argv} <= {"plot", "out"}
    if args.plot and nothing_asked:
        return picture.published(args.out)

    fleet, c = fleet_and_constants(args)
    settings_cfg = cfg
    m, cfg, args = with_defaults(m, cfg, args)
    own = plan_of_settings(m, settings_cfg, args, fleet, c) if files else None

    search_args = (asked, fleet, c, trainer(args))
    if args.sweep_devices:
        return show_sweep(budget.sweep(m, cfg, device_counts(args), *search_args), args)
    if args.budget:
        return show_budget(budget.budget(m, cfg, args.budget, *search_args), args)
    plans = search.best(m, cfg, *search_args, n=5)
    fixes = [] if plans[0].fits else search.what_fits(m, cfg, *search_args)
    ruled_out = search.ruled_out_by_batch(asked, plans[0])
    simpler = answer.within_error(plans[0], search.simpler(plans, m, cfg, *search_args))
    more = {
        "others": answer.others_json(plans),
        "would_fit": fixes,
        "batch_rules_out_dp": ruled_out,
        "simpler": answer.others_json([simpler])[0] if simpler else None,
    }
    below = [
        *answer.labelled("would fit", fixes),
        *answer.batch_lines(plans[0], ruled_out),
        *answer.others_lines(plans),
        *answer.simpler_lines(plans[0], simpler),
    ]
    show_plan(plans[0], args, own, more, below)


def compare(kinds: list[list[str]]) -> None:
    """Print what the same run takes on several kinds of device, and draw it if asked.

    kinds: the arguments for each of them.
    """
    offers = []
    questions = [question(argv) for argv in kinds]
    all_args = [args for *_, args, _ in questions]
    answer.require_own_calibration(all_args)
    differences = answer.differences(all_args)
    for (m, cfg, asked, args, _), unlike in zip(questions, differences, strict=True):
        require(not args.budget, "--budget plans for one kind of device: name one in --device")
        fleet, c = fleet_and_constants(args)
        m, cfg, args = with_defaults(m, cfg, args)
        for n in device_counts(args):
            try:
                sized = replace(fleet, devices=n)
                plan = search.fastest(m, cfg, asked, sized, c, trainer(args))
                offers.append(Offer(args, n, plan, unlike=unlike))
            except UserError as error:
                offers.append(Offer(args, n, problem=str(error), unlike=unlike))
    require(any(offer.plan for offer in offers), offers[0].problem)

    if args.json:
        print(json.dumps(answer.comparison_json(offers), indent=2))
    else:
        print(answer.comparison_text(offers))
    if args.plot:
        picture.time_and_cost(offers, args.out)


def show_sweep(rows: list[dict], args: PlanArgs) -> None:
    """Print the rows of budget.sweep, as text or JSON, and draw them if asked.

    Raises UserError if no number of devices can train the model.
    """
    good = answer.good_rows(rows)
    if not good:
        raise UserError(rows[0]["problem"])
    if args.json:
        print(json.dumps(answer.sweep_json(rows, args), indent=2))
    else:
        print(answer.sweep_text(rows, args))
    if args.plot and args.price:
        offers = [Offer(args, row["devices"], row["strong"]) for row in good]
        picture.time_and_cost(offers, args.out)
    elif args.plot:
        picture.scaling(good, args.out)


def show_budget(trainings: list[Training], args: PlanArgs) -> None:
    """Print the models of budget.budget: the plan of the first, and what is said of the others."""
    args = replace(args, tokens=float(trainings[0].tokens))
    more = {"trainings": [answer.training_json(training, args) for training in trainings]}
    show_plan(trainings[0].plan, args, None, more, answer.budget_lines(trainings, args.budget))


def show_plan(plan: Plan, args: PlanArgs, own: Plan | None, more: dict, below: list[str]) -> None:
    """Print the plan, as text or JSON, and draw its memory if asked.

    more, below: what the JSON and the text have beside the plan's figures.
    """
    if args.json:
        compared = {"your_layout": answer.comparison(plan, own)}
        print(json.dumps({**answer.figures(plan, args), **compared, **more}, indent=2))
    else:
        print(answer.text(plan, args, own, below))
    if args.plot:
        picture.bytes_by_sharding(plan.m, plan.cfg, plan.fleet, args.out)


if __name__ == "__main__":
    config.run(main)
