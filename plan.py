"""What a run will need, how fast it will be and how it will scale, before you launch it.

    python plan.py configs/mpt7b.py --device=mi250 --devices=64 --network=100   one layout
    python plan.py configs/mpt7b.py --device=mi250 --sweep_devices=8,64,256     strong, weak scaling
    python plan.py --device=h100 --devices=64 --budget=7                        the best in a week
    python plan.py configs/lora_mpt7b.py --lora_rank=16 --device=4090 --devices=1      adapters
    python plan.py configs/mpt7b.py --device=h100,mi250 --price=2.5,1.2 --sweep_devices=8,64 --plot
                                                     time, cost and energy on two kinds of device
    python plan.py configs/mpt7b.py --machine=frontier --devices=64             its nodes, network

What a config file or a flag sets is kept. What is `auto` or not set (tp, pp, sharding, microbatch,
activation checkpointing) is chosen: the fastest layout that fits. --choose leaves all of it open.
The flags launch the plan; the table has the fastest layouts, and your settings as they are if they
differ.

planning/search.py chooses, with the bytes of planning/memory.py and the seconds of
planning/step_time.py. Any device but A100 and H100 is extrapolated, and the plan says so, until
--calibrate brings measurements: a machine.json of `bench machine`, a table of `bench train`, or
both (--calibrate=results.csv:machine.json). Speeds, and so time, cost and energy, have an error
band: how far published runs of this kind were from their predictions.

Prices are yours, of one torch device for an hour. With several kinds of device, a flag has one
value for all or one for each. `--json` prints the rows of any answer for programs.
"""

import json
import math
from dataclasses import replace

import config
import flops
import program
from config import MPTConfig, TrainConfig
from launch import parser
from planning import answer, budget, calibrate, picture, search
from planning.answer import PlanArgs, Row
from planning.fleet import fleet_of
from planning.search import LayoutArgs, Plan, Question
from planning.step_time import Constants
from program import UserError, require


def main(argv: list[str]) -> None:
    """Answer the question that the config files and flags in argv ask."""
    argv = parser.join_flags(argv, MPTConfig, TrainConfig, LayoutArgs, PlanArgs)
    kinds = answer.split_kinds(argv)
    if len(kinds) > 1:
        return show_kinds(kinds)
    q, args = question(kinds[0][1])
    if args.sweep_devices:
        show_rows(answer.sweep(q, device_counts(args), args), args)
    elif args.budget:
        show_budget(q, args)
    else:
        show_plan(q, args, argv)


# --------------------------------------------------------------------------------------------------
# The question


def question(argv: list[str]) -> tuple[Question, PlanArgs]:
    """The question that argv asks. UserError if its settings contradict each other."""
    classes = (MPTConfig, TrainConfig, LayoutArgs, PlanArgs)
    m, cfg, asked, args = config.load(flops.with_base(argv), *classes)
    given = {flops.flag_name(text) for text in argv if text.startswith("-")}
    files = [text for text in argv if not text.startswith("-")]
    require_one_question(cfg, args, files, given)
    if args.choose:
        asked = replace(asked, **{name: "auto" for name in search.OPEN if name not in given})
    unknown = f"the planner does not know attn_impl={m.attn_impl}: set --attn_impl=sdpa"
    require(config.function_of(m.attn_impl) == "auto", f"{unknown}, which is full attention")
    if m.attn_impl != "triton":
        m = replace(m, attn_impl="auto")  # the trainer chooses one that keeps no scores
    if not args.global_batch_size:  # at least 4 sequences a device
        each = max(4, math.ceil(cfg.global_batch_size / args.devices))
        cfg = replace(cfg, global_batch_size=each * args.devices)
    if not args.tokens and (args.max_steps or cfg.lora_rank):
        args = replace(args, tokens=answer.tokens_of_steps(m, cfg))

    if args.calibrate:
        _, fleet, c = calibrate.from_files(calibrate.paths_in(args.calibrate), args)
    else:
        fleet, c = fleet_of(args), Constants()
    return Question(m, cfg, asked, fleet, c), args


def require_one_question(cfg: TrainConfig, args: PlanArgs, files: list[str], given: set) -> None:
    """UserError if the settings contradict the question. given: names of the flags."""
    fix = "remove --precision=fp32"
    require(cfg.precision != "fp32", f"plans are for bf16, in which speeds were published: {fix}")
    two_lengths = {"tokens", "max_steps"} <= given
    require(not two_lengths, "--tokens and --max_steps are two lengths of a run: remove one")
    found_by_budget = ("lora_rank", "tokens", "max_steps", *budget.SHAPE)
    extra = files + [f"--{name}" for name in found_by_budget if name in given]
    problem = f"--budget finds the model and its tokens: remove {' '.join(extra)}"
    require(not (args.budget and extra), problem)


def device_counts(args: PlanArgs) -> list[int]:
    """The numbers of --sweep_devices, sorted, or --devices alone. Raises UserError."""
    if not args.sweep_devices:
        return [args.devices]
    counts = [parser.parse_number(text) for text in args.sweep_devices.split(",")]
    example = "expected whole numbers, such as 8,16,64"
    problem = f"--sweep_devices={program.quote(args.sweep_devices)}: {example}"
    require(all(isinstance(n, int) for n in counts), problem)
    for n in counts:
        parser.check_ranges(replace(args, devices=n))
    return sorted(set(counts))


# --------------------------------------------------------------------------------------------------
# The answers


def show_rows(rows: list[Row], args: PlanArgs) -> None:
    """Print rows as a table or as JSON, and draw them if asked."""
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(answer.text_of_rows(rows))
    if args.plot:
        picture.draw_rows(rows, args.out)


def show_kinds(kinds: list[tuple[str, list[str]]]) -> None:
    """The same run on several kinds of device."""
    questions = [question(argv) for _, argv in kinds]
    rows = []
    for (differs, _), (q, args) in zip(kinds, questions, strict=True):
        require(not args.budget, "--budget plans for one kind of device: name one in --device")
        name = f"{q.fleet.device.name}{f' of {args.machine}' * bool(args.machine)}"
        label = ", ".join(filter(None, [name, differs]))
        rows += [answer.planned_on(q, n, args, label) for n in device_counts(args)]
    require(not all(row["problem"] for row in rows), rows[0]["problem"])
    show_rows(rows, args)


def show_budget(q: Question, args: PlanArgs) -> None:
    """The models of budget.budget, and how the first is trained."""
    rows = []
    trainings = budget.budget(q, args.budget)
    for (plan, tokens), label in zip(trainings, ("budget", "or smaller"), strict=False):
        rows.append(answer.row_of(plan, replace(args, tokens=tokens), label))
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    below = [line for row in rows for line in answer.training_lines(row)]
    print(answer.text(rows[0], below=below))


def show_plan(q: Question, args: PlanArgs, argv: list[str]) -> None:
    """The fastest plan in detail, and in a table the next ones and your settings as they are."""
    first, *plans = search.best(q, n=5)
    row = answer.row_of(first, args, "this plan")
    others = [answer.row_of(plan, args, "next") for plan in plans]
    own = plan_of_settings(q, argv)
    if own and answer.flags(own) != row["flags"]:
        others.append(answer.row_of(own, args, "your settings"))
    fix = "" if first.fits else search.what_fits(q)
    fixes = [fix] if fix else []
    if args.json:
        more = {"others": others, "would_fit": fixes}
        print(json.dumps({**row, **more}, indent=2))
    else:
        print(answer.text(row, others, answer.labelled("would fit", fixes)))
    if args.plot:
        picture.bytes_by_sharding(first, args.out)


def plan_of_settings(q: Question, argv: list[str]) -> Plan | None:
    """What fsdp_train.py would run with a config file as it is; None if it cannot."""
    is_open = "auto" in (getattr(q.cfg, name) for name in search.OPEN)
    if is_open or all(word.startswith("-") for word in argv):
        return None
    in_groups = q.cfg.sharding_mode.over == "group"
    shard_size = q.cfg.shard_size or (q.fleet.node_size if in_groups else 0)
    try:
        return search.evaluate(q.m, replace(q.cfg, shard_size=shard_size), q.fleet, q.c)
    except UserError:  # the model or the batch cannot be split over these devices
        return None


if __name__ == "__main__":
    program.run(main)
