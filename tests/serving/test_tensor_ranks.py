"""serving/rows.py on two tensor ranks: the engine of rank 0 writes what it would write alone."""

import pickle
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import slowly
from test_adapters import random_tensors
from test_engine import ADAPTERS, KINDS, SAMPLINGS, STEMS, V, alone, request, served, tiny

from model import MPT
from serving import rows
from serving.adapters import AdapterBank
from serving.decoder import Decoder
from serving.engine import Engine
from tensor_parallel import Team, cut


def part_of(world, kind) -> Decoder:
    """This rank's part of the model `kind`, with a bank of adapters."""
    whole = tiny(kind)
    part = MPT(whole.cfg).double()
    cut(part, Team(dist.group.WORLD, world.global_rank, world.global_size))
    with torch.no_grad():
        for name, param in part.named_parameters():
            param.copy_(part.layout.take(name, whole.get_parameter(name)))
    decoder = Decoder(part, V)
    read = lambda name: random_tensors(whole.cfg, name)  # noqa: E731
    AdapterBank(decoder, 8, 4, list(whole.cfg.linear_layers()), read)
    return decoder


def asked(kind, seed):
    """Requests of several adapters and settings, some with a known beginning."""
    draw = random.Random(seed)
    return [
        request(
            draw.choice(STEMS) + "x" * draw.randint(1, 9),
            draw.randint(1, 12),
            draw.choice(SAMPLINGS),
            draw.choice(ADAPTERS),
            kind,
            seed=number,
        )
        for number in range(12)
    ]


def write_in_company(world, kind):
    """On rank 0 the ids of all texts, of which some are cancelled, and the largest message."""
    decoder = part_of(world, kind)
    if world.global_rank > 0:
        rows.follow(decoder)
        return None
    sizes = []
    send = rows.send

    def weighed(calls, team):
        sizes.append((calls[-1][0], len(pickle.dumps(calls))))
        return send(calls, team)

    with mock.patch.object(rows, "send", weighed), rows.leading(decoder):
        engine = Engine(decoder, n_rows=3, max_tokens=114, chunk=16, prefix_bytes=10**6)
        requests = asked(kind, 1)
        for one in requests:
            engine.submit(one)
            engine.step()
        engine.cancel(requests[3])
        engine.cancel(requests[-1])
        while engine.is_busy:
            engine.step()
    assert engine.speed.prefix_tokens > 0
    largest = max(size for name, size in sizes if name == "decode")
    return [(one.text.ids, one.text.end) for one in requests], largest


@pytest.mark.parametrize("kind", ["gqa", *(slowly(kind) for kind in KINDS if kind != "gqa")])
def test_texts_are_those_of_one_process(ranks, kind):
    found, _ = ranks(2)(write_in_company, kind)
    texts, largest_step = found
    requests = asked(kind, 1)
    decode = served(kind)
    complete = [(one, ids, end) for one, (ids, end) in zip(requests, texts, strict=True)]
    complete = [found for found in complete if found[-1] != "cancelled"]
    assert 10 <= len(complete) < 12
    for one, ids, end in complete:
        wanted = alone(decode, one)
        assert (ids, end) == (wanted.ids, wanted.end)
    assert largest_step < 300  # bytes, for three rows


def test_the_first_error_of_a_call_is_kept_for_the_program_to_end_with():
    """It has left the ranks at different places: no later text may go on as if nothing was."""
    with mock.patch.object(rows, "send") as send:
        batch = rows.SharedBatch(served("gqa"), 3, 114, 0)
        batch.begin([1, 2, 3], None)
        assert batch.lost is None and send.call_count == 1  # `begin` is told with what computes
        send.side_effect = ConnectionError("rank 1 is gone")
        for words in ("rank 1 is gone", "and stays so"):
            with pytest.raises(ConnectionError, match=words):
                batch.read(3, None)
            send.side_effect = ConnectionError("and stays so")
    assert str(batch.lost) == "rank 1 is gone"
