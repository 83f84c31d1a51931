"""serving/adapters.py: mixed batches, which adapters have slots, loading beside decoding."""

import copy
import shutil
import threading
from concurrent import futures

import pytest
import torch
from conftest import PATIENCE, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from random_adapters import write_random
from test_decoder import LLAMA_LIKE, TINY, model, random_ids

import lora
from config import MPTConfig, TrainConfig
from model import seeded
from program import UserError
from serving.adapters import BASE, AdapterBank, bank_for, layers_of
from serving.decoder import Decoder, can_pack
from serving.engine import Engine, Request
from serving.sampling import Sampling
from serving.speed import Speed
from serving.stream import Text, write
from text import tokenizer as tokenizers
from weights import peft

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = tokenizers.load("bytes")
VOCAB = 257
STOPS = [chr(byte) for byte in range(0, 128, 8)]  # texts end at different steps
# Each kind of model, and what its adapters are: ranks, layers and scales differ.
KINDS = {
    "alibi": {"alibi": True},
    "learned": {},
    "rope, gqa": {"rope": True, "kv_n_heads": 2},
    "no bias, untied": {"alibi": True, "no_bias": True, "tie_word_embeddings": False},
    "llama-like": LLAMA_LIKE,
}
SETTINGS = {
    "all": {"lora_rank": 4, "lora_alpha": 8.0},
    "rslora": {"lora_rank": 7, "rslora": True},
    "one": {"lora_rank": 1, "lora_targets": "Wqkv", "lora_alpha": 3.0},
    "last": {"lora_rank": 3, "lora_targets": "out_proj,down_proj", "lora_last_blocks": 1},
}


def write_adapter(folder, cfg: MPTConfig, seed=0, **more) -> str:
    """A PEFT folder of an adapter that changes what a model writes."""
    write_random(folder, cfg, TrainConfig(init_from="any", **{"lora_rank": 4} | more), seed)
    return str(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`files(cfg)`: the paths of adapters of SETTINGS for a model, by name."""
    made = {}

    def paths(cfg: MPTConfig) -> dict[str, str]:
        key = str(cfg)
        if key not in made:
            folder = tmp_path_factory.mktemp("adapters")
            made[key] = {
                name: write_adapter(folder / name, cfg, seed, **more)
                for seed, (name, more) in enumerate(SETTINGS.items())
            }
        return made[key]

    return paths


def merged(mpt, path):
    """The obvious version: a copy of the model whose weights are W + s B A."""
    whole = copy.deepcopy(mpt)
    if path != BASE:
        found = peft.read(path)
        for name in {name.rpartition(".")[0] for name in found.tensors}:
            A = found.tensors[f"{name}.lora_A"].double()
            B = found.tensors[f"{name}.lora_B"].double()
            layer = whole.get_submodule(name)
            layer.weight.data += (found.scale * B @ A).to(layer.weight.dtype)
    return whole


def bank_on(mpt, n_slots=4, rank=8, dtype=None, vocab_size=VOCAB, read=peft.adapter_at):
    """A decoder of a copy of a model, and a bank on it."""
    decoder = Decoder(copy.deepcopy(mpt), vocab_size, dtype)
    return decoder, AdapterBank(decoder, n_slots, rank, mpt.cfg.linear_layers(), read)


def written(decoder, cfg, prompts, adapters, **sampling):
    """The ids of texts, of one batch."""
    texts = [
        new_text(cfg, prompt, adapter) for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    generate_all(decoder, texts, **sampling)
    return [text.ids for text in texts]


def written_alone(decoder, cfg, prompt, adapter=BASE, **sampling):
    """The ids of a text, by the obvious version."""
    text = new_text(cfg, prompt, adapter)
    list(write(decoder, text, **sampling))
    return text.ids


def new_text(cfg, prompt, adapter):
    return Text(prompt, BYTES, cfg, 20, STOPS, seed=5, adapter=adapter)


def generate_all(decoder, texts, **sampling):
    """One batch of texts, to their ends. Returns its speed."""
    engine = Engine(decoder, len(texts), max(text.max_length for text in texts))
    list(engine.run([Request(text, Sampling(**sampling)) for text in texts]))
    return engine.speed


# --- Mixed batches


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_a_mixed_batch_writes_what_each_merged_model_writes_alone(more, files):
    mpt = model(vocab_size=VOCAB, **more).double()
    paths = files(mpt.cfg)
    adapters = [BASE, *paths.values(), BASE, *paths.values()]
    prompts = ["the river", *["to be"] * 4, "to be", "a", "river ran", "", "x" * 9]
    sampling = {"temperature": 1.0, "top_k": 50}
    decoder, _ = bank_on(mpt)
    together = written(decoder, mpt.cfg, prompts, adapters, **sampling)
    alone = [
        written_alone(Decoder(merged(mpt, path), VOCAB), mpt.cfg, prompt, **sampling)
        for prompt, path in zip(prompts, adapters, strict=True)
    ]
    assert together == alone
    of_one_prompt = {tuple(ids) for ids in together[1:6]}
    assert len(of_one_prompt) == 5, "each adapter writes another text"
    assert len({len(ids) for ids in together[1:6]}) > 1, "they end at different steps"


def logits_of(decoder, ids):
    """The logits of a prompt and of one more token."""
    cache = decoder.model.new_cache(len(ids), 9, decoder.cache_dtype)
    with torch.inference_mode():
        return torch.stack([decoder(ids[:, :8], cache), decoder(ids[:, 8:], cache)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_the_base_are_those_of_a_decoder_without_a_bank_bit_by_bit(dtype, files):
    mpt = model(vocab_size=VOCAB, alibi=True)
    ids = random_ids((4, 9), seed=2)
    decoder, bank = bank_on(mpt, dtype=dtype)
    wanted = logits_of(Decoder(copy.deepcopy(mpt), VOCAB, dtype), ids)
    adapters = [BASE, files(mpt.cfg)["all"], BASE, files(mpt.cfg)["one"]]
    with bank.in_use(adapters):
        bank.use(adapters)
        mixed = logits_of(decoder, ids)
        assert torch.equal(mixed[:, [0, 2]], wanted[:, [0, 2]])
        assert (mixed[:, [1, 3]] - wanted[:, [1, 3]]).abs().amax(-1).min() > 0.01
    assert torch.equal(logits_of(decoder, ids), wanted), "nothing of them is left"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_and_packed_weights_are_as_exact_as_a_merged_model(dtype, device, tmp_path):
    """With one product for all rows, and with one for each."""
    mpt = model(vocab_size=VOCAB, alibi=True)
    path = write_adapter(tmp_path / "a", mpt.cfg, lora_alpha=2.0)
    ids = random_ids((3, 9), seed=3)
    wanted = logits_of(Decoder(merged(mpt.double(), path), VOCAB), ids)[:, :2]
    rounded = logits_of(Decoder(merged(mpt.double(), path), VOCAB, dtype), ids)[:, :2]
    decoder, bank = bank_on(mpt.to(device), dtype=dtype)
    packs = can_pack(torch.device(device), dtype)
    kinds = {type(decoder.model.get_submodule(name)).__name__ for name in bank.places}
    assert kinds == {"BankedPackedLinear" if packs else "BankedLinear"}
    for adapters in ([path] * 3, [path, path, BASE]):
        with bank.in_use(adapters):
            bank.use(adapters)
            found = logits_of(decoder, ids.to(device))[:, :2].cpu()
        assert (found - wanted).norm() < 2 * (rounded - wanted).norm()


def test_the_speed_counts_the_adapters_that_steps_read(files):
    mpt = model(vocab_size=VOCAB, alibi=True)
    a, b, *_ = files(mpt.cfg).values()
    decoder, bank = bank_on(mpt)
    slot = 2 * 8 * (128 + 64 + 160 + 160) * 4  # blocks, rank, widths in and out, fp32
    for adapters, slots in (([a, b, BASE], 3), ([a] * 3, 1), ([BASE] * 3, 0)):
        texts = [Text("a", BYTES, mpt.cfg, 5, adapter=adapter) for adapter in adapters]
        for adapter in adapters:  # so that all texts begin in the same step
            bank.acquire(adapter)
            bank.wait(adapter)
        speed = generate_all(decoder, texts, temperature=0)
        assert speed.steps == 4
        assert speed.adapter_bytes == 4 * slots * slot
        without = Speed(**vars(speed) | {"adapter_bytes": 0})
        assert speed.bytes_read(decoder) - without.bytes_read(decoder) == speed.adapter_bytes
        for adapter in adapters:
            bank.release(adapter)


# --- Which adapters have slots


def random_tensors(cfg, name):
    """An adapter in memory: its values, rank and layers depend on its name."""
    some_layers = {"lora_rank": 1, "lora_targets": "Wqkv"}
    chosen = TrainConfig(init_from="any", **(some_layers if name in "bd" else {"lora_rank": 2}))
    weights = lora.trained_weights(cfg, chosen)
    tensors = {
        key: torch.randn(p.shape, generator=seeded(1, name + key)) for key, p in weights.items()
    }
    return peft.Adapter(chosen, tensors)


CFG = MPTConfig(**TINY, alibi=True)
NAMES = "abcde"
IN_MEMORY = {name: random_tensors(CFG, name) for name in NAMES}


def slot_of(bank, adapter):
    """What the bank holds of an adapter, by the name of the tensor."""
    held = {}
    for name, place in bank.places.items():
        factors = bank.slots[bank.residents[adapter].slot, place.columns].view(bank.rank, -1)
        held[f"{name}.lora_A"] = factors[:, : place.in_features]
        held[f"{name}.lora_B"] = factors[:, place.in_features :].T
    return held


def assert_holds(bank, adapter):
    """Its slot has A and B with its scale, and zeros beyond its rank and its layers."""
    found = IN_MEMORY[adapter]
    for name, held in slot_of(bank, adapter).items():
        wanted = torch.zeros_like(held)
        if name in found.tensors:
            values = found.tensors[name] * (found.scale if name.endswith("B") else 1)
            wanted[: values.shape[0], : values.shape[1]] = values
        assert torch.equal(held, wanted)


MOVES = st.tuples(st.sampled_from(["acquire", "release"]), st.sampled_from(NAMES))


@settings(max_examples=25, deadline=None)
@given(n_slots=st.integers(1, 4), moves=st.lists(MOVES, min_size=20, max_size=40))
def test_the_least_recently_used_adapter_leaves_and_those_in_use_stay(n_slots, moves):
    """Beside a list of names, the least recently used first."""
    _, bank = bank_on(model(alibi=True), n_slots, rank=3, read=IN_MEMORY.__getitem__)
    order, users = [], dict.fromkeys(NAMES, 0)
    for move, name in moves:
        if move == "release":
            if not users[name]:
                continue
            bank.release(name)
            users[name] -= 1
        else:
            unused = [other for other in order if not users[other]]
            if name not in order and len(order) == n_slots:
                if not unused:
                    with pytest.raises(UserError, match=f"all {n_slots} slots hold adapters"):
                        bank.acquire(name)
                    continue
                order.remove(unused[0])
            bank.acquire(name)
            bank.is_loaded(name)
            users[name] += 1
        order = [other for other in order if other != name] + [name]
        assert list(bank.residents) == order
        assert bank.loaded.keys() <= {BASE, *order}
        slots = [resident.slot for resident in bank.residents.values()]
        assert sorted({0, *slots, *bank.free_slots}) == list(range(n_slots + 1))
    for name in order:
        bank.wait(name)
        assert_holds(bank, name)
    assert bank.loaded.keys() == {BASE, *order}
    assert not bank.slots[0].any()


# --- Loading


def test_a_slot_is_filled_in_the_order_in_which_it_changes_hands():
    """An adapter whose reading cannot be stopped any more loses its slot to another one."""
    begun, may_end = threading.Event(), threading.Event()

    def slow_read(path):
        if path == "a":
            begun.set()
            assert may_end.wait(PATIENCE)
        return IN_MEMORY[path]

    _, bank = bank_on(model(alibi=True), n_slots=1, rank=2, read=slow_read)
    bank.acquire("a")
    reading = bank.residents["a"].loading
    assert begun.wait(PATIENCE)
    bank.release("a")
    bank.acquire("b")
    futures.wait([bank.residents["b"].loading], timeout=0.2)
    may_end.set()
    reading.result()
    bank.wait("b")
    assert_holds(bank, "b")
    assert bank.loaded == {BASE: 0, "b": 1}


def test_a_file_that_cannot_be_loaded_is_named_and_may_be_mended(files, tmp_path):
    mpt = model(vocab_size=VOCAB, alibi=True)
    good = files(mpt.cfg)["all"]
    decoder, bank = bank_on(mpt, n_slots=1)
    adapter = str(tmp_path / "mine")
    shutil.copytree(good, adapter)
    weights = tmp_path / "mine/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for _ in range(2):
        bank.acquire(adapter)
        bank.residents[adapter].loading.exception(PATIENCE)
        assert f"{weights} is truncated or damaged" in refusal(bank.is_loaded, adapter)
        bank.release(adapter)
    shutil.copy(f"{good}/adapter_model.safetensors", weights)
    with bank.in_use([adapter]):
        assert bank.is_loaded(adapter)


def test_a_run_that_trained_norms_too_is_refused():
    chosen = TrainConfig(init_from="any", lora_rank=2, lora_train="norms")
    found = peft.Adapter(chosen, lora.trained_weights(CFG, chosen))
    _, bank = bank_on(model(alibi=True))
    message = refusal(bank.check, "runs/mine", found)
    assert "lora_train=norms" in message and "weights.peft merge runs/mine" in message
    assert set(layers_of(found)) == set(bank.places)


def test_a_bank_has_room_for_some_ranks_and_layers(files):
    mpt = model(vocab_size=VOCAB, alibi=True)
    paths = files(mpt.cfg)
    bank = bank_for(Decoder(mpt, VOCAB), [paths["one"]], 2, "runs/base")
    assert bank.slots.shape == (3, 2 * 1 * (32 + 96))  # two blocks, rank 1, Wqkv
    for name, rank in (("all", 4), ("last", 3)):
        message = refusal(bank.check, paths[name], peft.read(paths[name]))
        assert f"{paths[name]} has rank {rank}, and the bank has room for 1" in message
    bank.rank = 8
    message = refusal(bank.check, paths["last"], peft.read(paths["last"]))
    assert "transformer.blocks.1.attn.out_proj, for which the bank has no room" in message


def test_an_adapter_of_a_gate_is_refused_by_a_model_without_one(tmp_path):
    gated = MPTConfig(**TINY, ffn_type="mptglu")
    path = write_adapter(tmp_path / "gate", gated, lora_targets="gate_proj")
    _, bank = bank_on(model())
    for refused in (
        refusal(bank_for, Decoder(model(), 64), [path], 1, "runs/base"),
        refusal(bank.check, path, peft.read(path)),
    ):
        assert f"{path}: the adapter is not of this model" in refused
        assert "has no gate_proj: its ffn_type is mptmlp" in refused
