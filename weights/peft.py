"""Adapters from and to PEFT, the library with which most people train them.

    FOLDER/adapter_config.json            FOLDER/adapter_model.safetensors
        peft_type        LORA                 base_model.model.transformer.blocks.0.attn.Wqkv
        r                8                        .lora_A.weight  (r, in)
        lora_alpha       16                       .lora_B.weight  (out, r)
        use_rslora       false                ...
        lora_dropout     0.0
        target_modules   ["Wqkv", "out_proj"]     our name: the same without `base_model.model.`
        base_model_name_or_path                   and `.weight`

    y = W x + b + s B A x        s = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

    python -m weights.peft export runs/my-lora FOLDER              a run with adapters -> PEFT
    python -m weights.peft import FOLDER runs/new --init_from=BASE     PEFT -> such a run
    python -m weights.peft merge runs/my-lora runs/merged          W + s B A: a run without adapters
    python -m weights.peft merge FOLDER runs/merged --init_from=BASE

Which layers have adapters is read from the names of the tensors, not from target_modules. A setting
that would change what the model computes, and that lora.py does not have, is refused (`ALLOWED`).
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import checkpoint
import config
import flops
import lora
import optim
import parallel
import program
from config import LINEAR_LAYERS, MPTConfig, TrainConfig
from launch import parser
from model import MPT
from program import UserError, require
from storage import checkpoint_files, files
from weights import card, hf, hf_tokenizer, load
from weights.adapters import Adapter, check_fits, of_run
from weights.tensor_files import Stored, opened, stored_as, write_safetensors

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
TENSOR_NAME = re.compile(
    r"base_model\.model\.(transformer\.blocks\.(?:0|[1-9]\d{0,5})\."
    r"(?:attn\.(?:Wqkv|out_proj)|ffn\.(?:gate|up|down)_proj)\.lora_[AB])\.weight"
)

# Of adapter_config.json: what must be there, what may, and the types.
REQUIRED = {"peft_type": str, "r": int, "lora_alpha": float}
OPTIONAL = {  # null is the same as none of it
    "use_rslora": (bool, type(None)),
    "lora_dropout": (float, type(None)),
    "base_model_name_or_path": (str, type(None)),
}
# These change nothing in what a stored adapter computes: the tensors say which layers it has.
IGNORED = """
    target_modules exclude_modules layers_to_transform layers_pattern
    task_type auto_mapping revision peft_version inference_mode megatron_core runtime_config
    qalora_group_size
""".split()
# Any other setting is accepted only with one of these values. Those of init_lora_weights leave the
# base's weights unchanged; PiSSA, OLoRA and others change them.
OFF = [None, False, [], {}, ""]
ALLOWED = {"bias": ["none"], "init_lora_weights": [True, False, None, "gaussian", "orthogonal"]}

# --------------------------------------------------------------------------------------------------
# Reading


def read(folder) -> Adapter:
    """The adapter in a PEFT folder, by our names. Its settings do not say which layers have one.

    Its tensors have the dtype of the file. They are mapped into memory, not copied: the file must
    not change while they are in use. Raises UserError for anything that lora.py cannot compute
    exactly, for damage, and for numbers that are not finite; OSError if a file cannot be read.
    """
    folder = Path(folder)
    source = folder / CONFIG_FILE
    problem = f"no adapter in {folder}{files.absence(folder)}"
    require(source.exists(), f"{problem}: expected {CONFIG_FILE} and {TENSOR_FILE}")
    foreign = files.read_json(source)
    settings = settings_from(foreign, source)
    fix = "load it with a current peft, whose save_pretrained writes that file"
    has_tensors = (folder / TENSOR_FILE).exists()
    require(has_tensors, f"{folder} has no {TENSOR_FILE} beside {CONFIG_FILE}: {fix}")
    tensors = mapped(folder / TENSOR_FILE, settings.lora_rank)
    return Adapter(settings, tensors, foreign.get("base_model_name_or_path") or "")


def settings_from(foreign: dict, source: Path) -> TrainConfig:
    """Our settings for an adapter_config.json. UserError names one that computes something else."""
    kind = foreign.get("peft_type")
    require(kind == "LORA", f"{source} has peft_type {files.shown(kind)}: only LORA can be read")
    types = REQUIRED | OPTIONAL
    fault = files.missing(foreign, REQUIRED) or files.wrong_type(foreign, types)
    require(not fault, f"{source} is damaged ({fault})")
    for name, value in foreign.items():
        neutral = ALLOWED.get(name, OFF)
        is_neutral = any(value == allowed and type(value) is type(allowed) for allowed in neutral)
        expected = f": expected {' or '.join(map(json.dumps, neutral))}" if name in ALLOWED else ""
        problem = f"{source} sets {program.one_line(name)} to {files.shown(value)}"
        is_known = name in types or name in IGNORED or is_neutral
        require(is_known, f"{problem}, which lora.py does not have{expected}")
    settings = TrainConfig(
        lora_rank=foreign["r"],
        lora_alpha=float(foreign["lora_alpha"]),
        rslora=foreign.get("use_rslora") or False,
        lora_dropout=float(foreign.get("lora_dropout") or 0),
    )
    try:
        parser.check_ranges(settings)
        require(settings.lora_rank, "r is 0, so there is no update")
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return settings


def mapped(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file by our names, mapped into memory.

    Raises UserError for a name that is not an adapter's, damage, or numbers that are not finite.
    """
    with opened(path) as content:
        require(content, f"{path} holds no tensors")
        stored = {}
        for name, x in content.items():
            found = TENSOR_NAME.fullmatch(name)
            example = "base_model.model.transformer.blocks.0.attn.Wqkv.lora_A.weight"
            problem = f"{path} holds {program.one_line(name)}, no adapter of a linear layer"
            require(found, f"{problem}: expected names like {example}")
            stored[found[1]] = stored_as(path, name, x)
        check_pairs(stored, rank, path.parent)
        tensors = {ours: content[theirs.name][:] for ours, theirs in stored.items()}
    for name, tensor in tensors.items():
        checkpoint_files.require_finite(f"{name} in {path}", tensor)
    return tensors


def check_pairs(stored: dict[str, Stored], rank: int, folder: Path) -> None:
    """UserError unless each layer has A (rank, in) and B (out, rank)."""
    for name, tensor in stored.items():
        layer, _, factor = name.rpartition(".")
        is_a = factor == "lora_A"
        other = "lora_B" if is_a else "lora_A"
        require(f"{layer}.{other}" in stored, f"{layer} has {factor} but no {other} in {folder}")
        shape = tensor.shape
        fits = len(shape) == 2 and shape[0 if is_a else 1] == rank
        expected = f"({rank}, in)" if is_a else f"(out, {rank})"
        require(fits, f"{name} is {shape} in {folder}, expected {expected}, since r is {rank}")


def adapter_at(path) -> Adapter:
    """The adapter at a path, of a PEFT folder or a run. UserError if there is none."""
    if is_peft(path):
        return read(path)
    problem = f"no adapter in {path}{files.absence(path)}"
    require(load.is_run(Path(path)), f"{problem}: expected a run, or {CONFIG_FILE}")
    return of_run(path)


def is_peft(path) -> bool:
    """Is this a PEFT folder?"""
    return (Path(path) / CONFIG_FILE).exists()


# --------------------------------------------------------------------------------------------------
# Writing


def write(folder, adapter: Adapter, found: Path | None = None) -> None:
    """Write an adapter as a PEFT folder, beside it the model card of `found`, its checkpoint.

    Its base should be the name under which others find it: a Hub name or a folder. Raises UserError
    if the folder has content already, or if the run trained more than adapters.
    """
    settings = adapter.settings
    extra = f"what was trained beside them (lora_train={settings.lora_train})"
    fix = "merge them: python -m weights.peft merge RUN OUT"
    require(not settings.lora_train, f"PEFT's files of adapters cannot hold {extra}: {fix}")
    alpha = settings.lora_alpha
    foreign = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": settings.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # PEFT writes whole numbers
        "use_rslora": settings.rslora,
        "lora_dropout": settings.lora_dropout,
        **targets_of(adapter),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    theirs = {f"base_model.model.{name}.weight": x for name, x in adapter.tensors.items()}
    with hf.published(Path(folder)) as staging:
        write_safetensors(staging / TENSOR_FILE, theirs)
        (staging / CONFIG_FILE).write_text(json.dumps(foreign, indent=2))
        if found:
            card.write_beside(staging, found)


def targets_of(adapter: Adapter) -> dict:
    """The settings by which PEFT finds the layers of an adapter: these, and no others.

    Without target_modules it would take Wqkv alone on MPT, and drop the other tensors.
    """
    layers_of = layers_by_block(adapter)
    names = [name for name in LINEAR_LAYERS if name in set.union(*layers_of.values())]
    if all(layers == set(names) for layers in layers_of.values()):
        blocks = sorted(layers_of)
        return {
            "target_modules": names,
            "layers_to_transform": blocks,
            "layers_pattern": "blocks",
        }
    paths = dict.fromkeys(name.rpartition(".")[0] for name in adapter.tensors)
    return {"target_modules": list(paths), "layers_to_transform": None, "layers_pattern": None}


def layers_by_block(adapter: Adapter) -> dict[int, set[str]]:
    """The layers of each block that has adapters, such as {2: {"Wqkv", "up_proj"}}."""
    layers_of = {}
    for name in adapter.tensors:
        _, _, block, _, layer, _ = name.split(".")
        layers_of.setdefault(int(block), set()).add(layer)
    return layers_of


def export(run, folder, base_model: str = "") -> None:
    """Write the adapters of a run, or of one of its checkpoints, as a PEFT folder.

    base_model: the name under which others find the base: a Hub name or a folder; empty: the path
    that the run began from.
    """
    adapter = of_run(run)
    if base_model:
        adapter.base = base_model
    write(folder, adapter, checkpoint.find(str(run)))
    print(f"{folder}: adapters of rank {adapter.rank} for {adapter.base}")
    if not base_model and load.is_run(Path(adapter.base)):
        command = f"python -m weights.hf export {program.shell(adapter.base)} BASE"
        print(f"To share it, export the base, {command}, then export again with --base_model=BASE")


# --------------------------------------------------------------------------------------------------
# Import


def import_(folder, run_dir, base: str) -> None:
    """Write the adapter of a PEFT folder as a run folder with a checkpoint `step-0`.

    base: the model that it belongs to, as for --init_from. The checkpoint holds the adapters alone
    and names the base. Raises UserError if they do not fit together.
    """
    adapter = read(folder)
    meta = write_start(adapter, folder, run_dir, base)
    named = program.one_line(adapter.base)
    author = f" Its author names the base {named}." if named else ""
    print(f"{run_dir}: adapters of rank {adapter.rank} on {meta['base']}.{author}")


def write_start(adapter: Adapter, source, run_dir, base: str) -> dict:
    """Write an adapter, found at `source`, as a run that has not begun. Returns its meta.json.

    UserError as above, or if more than adapters was trained.
    """
    require(not adapter.settings.lora_train, f"{source} trained more than adapters: merge it")
    base_cfg = load.settings_of(base)
    load.check_same_model(base, base_cfg)  # refuses a run that holds adapters itself
    check_fits(adapter, base_cfg, base)
    settings = placed(adapter, base_cfg)
    name, file = load.tokenizer_of(Path(base))
    settings = replace(settings, init_from=base, run_dir=str(run_dir), tokenizer=name)
    flops.check_adapters(base_cfg, settings)
    meta = meta_of(base_cfg, settings, source) | load.base_of(base, {})
    with hf.published(Path(run_dir)) as staging:
        state = state_at_start(base_cfg, settings, adapter)
        hf.write_checkpoint(staging / "checkpoints" / "step-0", meta, state)
        hf_tokenizer.save(name, file, staging)
        load.keep_generation(meta["base"], staging)
    return meta


def placed(adapter: Adapter, cfg: MPTConfig) -> TrainConfig:
    """The settings with lora_targets and lora_last_blocks. UserError if no run has such layers."""
    layers_of = layers_by_block(adapter)
    blocks = sorted(layers_of)
    layers = layers_of[blocks[0]]
    is_regular = all(layers_of[block] == layers for block in blocks)
    is_last = blocks == list(range(blocks[0], cfg.n_layers))
    problem = "a run needs the same layers in each of its last blocks; this folder has other ones"
    fix = "merge it instead: python -m weights.peft merge FOLDER OUT --init_from=BASE"
    require(is_regular and is_last, f"{problem} (blocks {blocks[:8]}): {fix}")
    targets = ",".join(name for name in LINEAR_LAYERS if name in layers)
    last_blocks = 0 if len(blocks) == cfg.n_layers else len(blocks)
    return replace(adapter.settings, lora_targets=targets, lora_last_blocks=last_blocks)


def meta_of(cfg: MPTConfig, settings: TrainConfig, source) -> dict:
    """The meta.json of a checkpoint that was made from files at `source`."""
    # "": any precision may resume from it.
    origin = {"precision": "", "data_fingerprint": f"imported from {source}"}
    return {"step": 0, **asdict(cfg), **asdict(settings), **origin}


def state_at_start(cfg: MPTConfig, settings: TrainConfig, adapter: Adapter) -> dict:
    """The state of a run before its first step, to resume from: adapters, an optimizer at rest."""
    with torch.device("meta"):
        model = MPT(cfg)
    lora.put_on(model, settings)
    for name in lora.adapters_of(model):
        layer, _, factor = name.rpartition(".")
        values = adapter.tensors[name].float()
        setattr(model.get_submodule(layer), factor, torch.nn.Parameter(values))
    adapters = lora.adapters_of(model)
    state = checkpoint.state_of(model, optim.build_optimizer(adapters.items(), settings))
    for key, value in state["optim"].items():
        if key.startswith("state."):
            value.zero_()  # PyTorch has counted one step, to make the state
    return state


# --------------------------------------------------------------------------------------------------
# Merge


def merge(source, run_dir, base: str = "") -> None:
    """Write base + adapters as a run folder with a whole checkpoint `step-0`; print the error.

    source: a run with adapters, or a PEFT folder. base: of a PEFT folder, as for --init_from; of a
    run, where its base is now if it was moved.
    """
    hf.require_free(Path(run_dir))  # first, since loading a large model takes minutes
    model, (name, file) = adapted_model(source, base)
    before = sample_logits(model)
    error = lora.merge(model)
    after = sample_logits(model)
    settings = TrainConfig(run_dir=str(run_dir), tokenizer=name)
    with hf.published(Path(run_dir)) as staging:
        state = {"model": model.state_dict()}
        meta = meta_of(model.cfg, settings, source)
        hf.write_checkpoint(staging / "checkpoints" / "step-0", meta, state)
        hf_tokenizer.save(name, file, staging)
        load.keep_generation(base if is_peft(source) else source, staging)
    n_params = sum(param.numel() for param in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    print(f"{run_dir}: {n_params:,} parameters, in {dtype}")
    print(f"Rounding to {dtype} changes a weight by at most {error:.2g}")
    largest = before.abs().max().item()
    difference = (after - before).abs().max().item()
    changes = f"Merging changes the logits of {len(before)} random ids"
    print(f"{changes} by at most {difference:.2g}; the largest is {largest:.3g}")


def adapted_model(source, base: str) -> tuple[MPT, tuple[str, Path | None]]:
    """Base and adapters, not merged yet, with name and file of the tokenizer. As for `merge`."""
    device = torch.device("cpu")
    if not is_peft(source):
        found = checkpoint.find(str(source))
        return load.load_adapted(found, device, base=base), load.tokenizer_of(found)
    adapter = read(source)
    where = f"{source} holds adapters alone, for {adapter.base or 'a base that it does not name'}"
    require(base, f"{where}: set --init_from to that model")
    model = load.with_adapter(Path(base), load.settings_of(base), adapter, device)
    return model, load.tokenizer_of(Path(base))


@torch.no_grad()
def sample_logits(model: MPT) -> torch.Tensor:
    """The logits of a few random ids, (T, V) in fp32. Half precision computes in bf16."""
    n_ids = min(64, model.cfg.max_seq_len)
    ids = torch.randint(
        model.cfg.vocab_size, (1, n_ids), generator=torch.Generator().manual_seed(0)
    )
    is_half = next(model.parameters()).dtype.itemsize < 4
    with parallel.autocast(ids.device, "bf16" if is_half else "fp32"):
        return model(ids)[0].float()


# --------------------------------------------------------------------------------------------------
# Commands


@dataclass
class Flags:
    """The flags of `import`, `merge` and `export`."""

    init_from: str = ""  # import, merge: the base, as for fsdp_train.py
    base_model: str = ""  # export: the Hub name or folder of the base (empty = its path here)


def main(argv) -> None:
    """Export, import or merge, as the command line says."""
    arguments, flags = config.load(argv, Flags, takes="export|import|merge SOURCE TARGET")
    command, source, target = arguments
    commands = ("export", "import", "merge")
    require(command in commands, f"{command!r} is none of {', '.join(commands)}: see --help")
    base = flags.init_from
    require(not base or Path(base).exists(), f"--init_from={base} does not exist")
    if command == "export":
        require(not flags.init_from, "a run names its base: remove --init_from")
        export(source, target, flags.base_model)
        return
    require(not flags.base_model, "only export takes --base_model: remove it")
    if command == "import":
        missing = f"{source} does not hold its base: set --init_from=runs/NAME, or a folder"
        require(flags.init_from, missing)
        import_(source, target, flags.init_from)
    else:
        merge(source, target, flags.init_from)


if __name__ == "__main__":
    program.run(main)
