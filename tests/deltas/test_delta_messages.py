"""ibp.deltas.Sender and Receiver: messages in any order, lost, repeated and damaged ones, shards, coded weights."""

import bisect
import json
import random
import struct

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ibp
from helpers import assert_same_bits
from ibp.deltas import OutOfSyncError, Receiver, Sender, _applying, _sending
from ibp.deltas._applying import BasePart
from ibp.deltas._messages import ChangeHead, PushHead, Region
from interrupts import interrupt_at
from ranks import Ranks
from test_delta import bits, changed, optimizer_step


def some_weights(seed=0):
    """Weights of several dtypes; two names have one tensor, and one is no row long."""
    torch.manual_seed(seed)
    embed = torch.randn(300, 40).mul(0.02).bfloat16()
    return {
        "embed": embed,
        "layer": torch.randn(64, 257).mul(0.02).bfloat16(),
        "norm": torch.ones(33),
        "scale": torch.tensor(2.0),
        "empty": torch.zeros(0, 5),
        "mask": bits(torch.bool, 50),
        "turned": torch.randn(70, 60).t(),
        "head": embed,
    }


def copies(weights):
    """The same values, tied as they are."""
    made = {id(tensor): tensor.clone() for tensor in weights.values()}
    return {name: made[id(tensor)] for name, tensor in weights.items()}


def train(weights, share=0.05, most=2):
    for tensor in {id(tensor): tensor for tensor in weights.values()}.values():
        tensor.copy_(changed(tensor, share, most))


def assert_same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(found[name], tensor)


def applied(receiver, messages):
    """Whether the last message made the version, and no other one did."""
    return [receiver.apply(message) for message in messages] == [False] * (len(messages) - 1) + [True]


# ---- pushes ----


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 1])
@pytest.mark.parametrize("most", [1, 1 << 62])
@pytest.mark.parametrize("piece_bytes", [pytest.param(1000, marks=pytest.mark.slow), 5000, 1 << 20])
def test_any_change(share, most, piece_bytes):
    there = some_weights()
    here, sender = copies(there), Sender(there, piece_bytes=piece_bytes)
    receiver = Receiver(here)
    for version in range(1, 4):
        train(there, share, most)
        messages = sender.push(there)
        assert (len(messages) > 1) == (piece_bytes < 1 << 20)
        assert applied(receiver, messages)
        assert sender.version == receiver.version == version
        assert_same_weights(here, there)
    assert here["embed"] is here["head"]


def test_a_module_that_starts_with_other_weights():
    there, here = (torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40)) for _ in range(2))
    sender, receiver = Sender(), Receiver(here)
    assert applied(receiver, sender.push(there))
    assert_same_weights(here.state_dict(), there.state_dict())
    with torch.no_grad():
        there[0].weight[3] += 1
    assert applied(receiver, sender.push(there.named_parameters()))
    assert_same_weights(dict(here.named_parameters()), dict(there.named_parameters()))
    assert here[0].weight.requires_grad and here[0].weight._version


def test_messages_are_small():
    new, base = optimizer_step((2000, 1000), 1.3e-6)
    sender = Sender({"w": base})
    (message,) = sender.push({"w": new})
    index_and_value = 6 * int((new.view(torch.int16) != base.view(torch.int16)).sum())
    assert 4.4 * message.numel() < index_and_value
    (message,) = sender.push({"w": new})
    assert message.numel() < 700, "nothing has changed"


def test_copies_in_host_memory_and_unchanged_sources():
    there = some_weights()
    sender, receiver = Sender(there, memory="host", device="cpu"), Receiver(copies(there))
    before = copies(there)
    train(there)
    after = copies(there)
    messages = sender.push(there)
    assert_same_weights(there, after)
    assert applied(receiver, messages) and not torch.equal(before["layer"], there["layer"])


def test_names_that_come_and_shapes_that_change():
    there = {"a": torch.randn(20, 3), "b": torch.randn(7)}
    sender, base = Sender(there, piece_bytes=100), there["a"].clone()
    there = {"a": base + 1, "c": torch.randn(5), "b": torch.randn(8)}
    messages, here = sender.push(there), {name: torch.zeros_like(tensor) for name, tensor in there.items()}
    with pytest.raises(OutOfSyncError, match="a has fingerprint"):
        applied(Receiver(here), messages)
    here["a"].copy_(base)
    assert applied(Receiver(here), messages)
    assert_same_weights(here, there)


def test_small_tensors_are_joined():
    """A mixture's many experts take few regions, and hardly more bytes than one tensor."""
    new, base = optimizer_step((200, 32, 64), 1e-6)
    there = {f"experts.{number}": expert for number, expert in enumerate(base)}
    here, sender = copies(there), Sender(there)
    (message,) = sender.push({f"experts.{number}": expert for number, expert in enumerate(new)})
    (one,) = Sender({"experts": base}).push({"experts": new})
    assert message.numel() - one.numel() < 50 * len(there)
    assert applied(Receiver(here), [message])
    assert_same_weights(here, {f"experts.{number}": expert for number, expert in enumerate(new)})


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"weights": {"a": 3}}, TypeError, "a is a int"),
        ({"memory": "disk"}, ValueError, "memory is 'disk'"),
        ({"part": (2, 2)}, ValueError, r"part\[0\] is 2"),
        ({"piece_bytes": 0}, ValueError, "piece_bytes is 0"),
    ],
)
def test_arguments_that_are_refused(arguments, kind, match):
    with pytest.raises(kind, match=match):
        Sender(**arguments)


# ---- what goes wrong ----


class Link:
    """A sender with three pushed versions, and a receiver that has the first."""

    def __init__(self, piece_bytes=5000):
        self.there = some_weights()
        self.here = copies(self.there)
        self.sender, self.receiver = Sender(self.there, piece_bytes=piece_bytes), Receiver(self.here)
        self.versions, self.pushes = [copies(self.there)], []
        for _ in range(3):
            train(self.there)
            self.pushes.append(self.sender.push(self.there))
            self.versions.append(copies(self.there))
        assert applied(self.receiver, self.pushes[0])

    def refuses(self, messages, match, kind=OutOfSyncError):
        """That a message is refused, and the weights stay."""
        before = copies(self.here)
        with pytest.raises(kind, match=match):
            for message in messages:
                self.receiver.apply(message)
        assert_same_weights(self.here, before)

    def recovers(self):
        assert applied(self.receiver, self.sender.push(self.there, full=True))
        assert_same_weights(self.here, self.there)
        train(self.there)
        assert applied(self.receiver, self.sender.push(self.there))
        assert_same_weights(self.here, self.there)


def test_a_lost_push():
    link = Link()
    link.refuses(link.pushes[2], r"version 3 of version 2, and the weights are version 1: .*push\(..., full=True\)")
    link.recovers()


def test_a_lost_message_of_a_push():
    link = Link()
    for message in link.pushes[1][1:]:
        assert not link.receiver.apply(message)
    link.refuses(link.pushes[2], "a message is lost")
    assert link.receiver.apply(link.pushes[1][0]), "it was only late"
    assert applied(link.receiver, link.pushes[2])
    assert_same_weights(link.here, link.versions[3])


def test_a_message_that_does_not_fit_has_not_come():
    """It is refused at once, and may come again; what has come stays."""
    link = Link()
    first, *others = link.pushes[1]
    assert len(others) > 1
    assert not link.receiver.apply(others[0])
    link.receiver._bases.clear()
    away = link.receiver._weights.pop("embed")
    link.refuses([first], "there is no tensor 'embed' here", KeyError)
    link.receiver._weights["embed"] = away
    assert applied(link.receiver, [first, *others[1:]])
    assert_same_weights(link.here, link.versions[2])


def test_pieces_of_a_push_that_are_lost_before_the_first_version():
    link = Link()
    other = Receiver(copies(link.versions[1]))
    other.apply(link.pushes[1][0])
    with pytest.raises(OutOfSyncError, match="1 of .* messages of version 2 have come, and now one of version 3"):
        other.apply(link.pushes[2][0])


def test_repeated_messages():
    link = Link()
    link.refuses(link.pushes[0], "version 1 came again")
    link.receiver.apply(link.pushes[1][0])
    link.refuses(link.pushes[1][:1], "message 0 of .* of version 2 came again")
    assert applied(link.receiver, link.pushes[1][1:])
    link.refuses(link.pushes[1], "version 2 came again")
    link.recovers()


def test_a_receiver_that_joins_later():
    link = Link()
    late = copies(link.versions[2])
    assert applied(Receiver(late), link.pushes[2])
    assert_same_weights(late, link.versions[3])
    late = copies(link.versions[2])
    late["scale"] += 1
    sender = Sender(link.versions[2], piece_bytes=16)
    messages = sender.push(link.versions[2] | {"norm": link.versions[3]["norm"]})
    with pytest.raises(OutOfSyncError, match="scale has fingerprint .* at the sender"):
        applied(Receiver(late), messages)


def test_weights_that_somebody_has_changed():
    link = Link()
    link.here["layer"][5, 5] = 7
    link.refuses(link.pushes[1], "layer has fingerprint .*full=True")
    link.recovers()


def test_a_new_sender_goes_on_where_the_old_one_ended():
    link = Link()
    applied(link.receiver, link.pushes[1])
    sender = Sender(link.versions[2])
    assert applied(link.receiver, sender.push(link.versions[3])) and link.receiver.version == 1
    assert_same_weights(link.here, link.versions[3])
    link.refuses(link.pushes[0], "has fingerprint")


@pytest.mark.slow
@hypothesis.given(st.randoms(use_true_random=False), st.integers(1_000, 20_000))
@hypothesis.settings(max_examples=10)  # each is up to a hundred messages
def test_any_order_within_a_push(rng, piece_bytes):
    link = Link(piece_bytes)
    for push in link.pushes[1:]:
        assert applied(link.receiver, rng.sample(push, len(push)))
    assert_same_weights(link.here, link.versions[3])


@hypothesis.given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_damaged_messages(place, flipped):
    link = Link(1 << 20)
    (message,) = link.pushes[1]
    damaged = message.clone()
    damaged[place % len(damaged)] ^= flipped
    link.refuses([damaged], "damaged|bytes; wanted|is not from an", ibp.CorruptTableError)
    assert link.receiver.apply(message), "sent again"
    assert_same_weights(link.here, link.versions[2])


@pytest.mark.parametrize("full", [False, True])
def test_a_buffer_that_is_used_for_each_message(full):
    link = Link()
    messages = link.sender.push(link.there, full=True) if full else link.pushes[1]
    buffer = torch.empty(max(map(len, messages)), dtype=torch.uint8)
    found = []
    for message in messages:
        found.append(link.receiver.apply(buffer[: len(message)].copy_(message)))
        buffer.fill_(0xA5)
    assert len(messages) > 2 and found == [False] * (len(messages) - 1) + [True]
    assert_same_weights(link.here, link.there if full else link.versions[2])


def with_head(message, change):
    """A message whose head is another one. change: makes it of the head's JSON."""
    length, num_bytes = struct.unpack_from("<QQ", bytes(message[8:24].tolist()))
    head = bytes(message[32 : 32 + length].tolist())
    end = 8 + struct.unpack_from("<Q", head)[0]
    text = json.dumps(change(json.loads(head[8:end]))).encode()
    head = struct.pack("<Q", len(text)) + text + head[end:]
    body = torch.tensor(list(head + bytes(-len(head) % 16)), dtype=torch.uint8)
    body = torch.cat([body, message[len(message) - num_bytes :]])
    prefix = b"ibp push" + struct.pack("<QQQ", len(head), num_bytes, ibp.deltas.fingerprint(body))
    return torch.cat([torch.tensor(list(prefix), dtype=torch.uint8), body])


def field(name, value):
    """Sets a field of a `PushHead`."""
    number = PushHead._fields.index(name)

    def change(form):
        form[2][number] = value
        return form

    return change


def test_heads_are_read_as_they_are_written():
    (message,) = Link(1 << 20).pushes[1]
    assert torch.equal(with_head(message, lambda form: form), message)


@pytest.mark.parametrize(
    ("change_sizes", "match"),
    [
        (lambda sizes: [sizes[2], sizes[3], sizes[1], sizes[0]], "a change of the message is not what its head says"),
        (lambda sizes: [sum(sizes)], "does not say how large it is"),
        (lambda sizes: [*sizes, 0], "does not say how large it is"),
        (lambda sizes: [sizes[0], -sizes[1], *sizes[2:]], "does not say how large it is"),
        (lambda sizes: [*sizes[:3], sizes[3] + 16], "bytes of changes; its head says"),
        (lambda sizes: [sizes[0] + 1, sizes[1] - 1, *sizes[2:]], "a change of the message is not what its head says"),
    ],
    ids=["older order", "one", "five", "negative", "too many bytes", "odd"],
)
def test_sizes_of_changes_that_are_not_those_of_their_parts(change_sizes, match):
    weights = {"w": torch.randn(64, 300).bfloat16()}
    sender, receiver = Sender(weights), Receiver(copies(weights))
    train(weights)
    (message,) = sender.push(weights)

    def change(form):
        (region,) = form[2][PushHead._fields.index("regions")][1]
        sizes = region[2][Region._fields.index("change")][2][ChangeHead._fields.index("sizes")]
        sizes[1] = change_sizes(sizes[1])
        return form

    with pytest.raises(ibp.CorruptTableError, match=match):
        receiver.apply(with_head(message, change))
    assert receiver.apply(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "kind", "match"),
    [
        ("part", ["tuple", [0, 2]], OutOfSyncError, "of one of 2 senders, and others of version 2 are of one of 1"),
        ("piece", ["tuple", [1, 2]], OutOfSyncError, "one of 2 that make version 2 of version 1, and others are of"),
        ("base", None, OutOfSyncError, "version 2 of version None, and others are of .*, and of version 1"),
        ("piece", ["tuple", [7, 7]], ibp.CorruptTableError, "it says that it is number 7 of 7, of sender 0 of 1"),
        ("part", ["tuple", [-1, 1]], ibp.CorruptTableError, "of sender -1 of 1"),
        ("regions", ["list", [7]], ibp.CorruptTableError, "regions of a PushHead is a list; wanted list"),
        ("version", "2", ibp.CorruptTableError, "version of a PushHead is a str; wanted <class 'int'>"),
    ],
)
def test_messages_that_contradict_their_push(name, value, kind, match):
    link = Link()
    first, second, *others = link.pushes[1]
    link.receiver.apply(first)
    link.refuses([with_head(second, field(name, value))], match, kind)
    assert applied(link.receiver, [second, *others])
    assert_same_weights(link.here, link.versions[2])


def test_the_plan_of_a_push_follows_the_weights():
    """A sender keeps the division into regions for the next push, but not if tensors move, are untied or change."""
    tied = torch.randn(40, 8)
    there = {"a": tied, "b": tied, "c": torch.randn(64, 48), "d": torch.randn(3)}
    here, sender = {name: tensor.clone() for name, tensor in there.items()}, Sender(there, piece_bytes=8192)
    receiver = Receiver(here)
    for change in (
        lambda: None,
        lambda: there.update(c=there["c"] + 1),  # in other memory
        lambda: there.update(b=torch.randn(40, 8)),  # not tied any more
        lambda: there["a"].add_(1),
        lambda: there.update(a=there["b"]),  # tied again
    ):
        change()
        for message in sender.push(there):
            receiver.apply(message)
        assert all(torch.equal(here[name], there[name]) for name in there)


def test_weights_are_divided_once(monkeypatch):
    """Unless something changes that decides which tensors share a region: here the dtype of a tensor without
    elements. That the weights lie in other memory does not matter."""
    weights = {"a": torch.randn(4), "empty": torch.empty(0, 8), "b": torch.randn(5)}
    sender, divided, divide = Sender(piece_bytes=4 * 4096), [], _sending._divided
    monkeypatch.setattr(_sending, "_divided", lambda *args: divided.append(1) or divide(*args))
    for _ in range(3):
        moved = {name: tensor.clone() for name, tensor in weights.items()}
        (region,) = sender._regions(moved)
        assert torch.equal(region.values(), torch.cat([moved["a"], moved["b"]]))
    assert len(divided) == 1
    weights["empty"] = weights["empty"].half()
    assert sorted(str(region.dtype) for region in sender._regions(weights)) == ["torch.float16", "torch.float32"]
    assert len(divided) == 2


def in_one_buffer(weights):
    """The same values as views of one buffer, one after the other, which begin at any element of its memory."""
    sizes = [tensor.numel() for tensor in weights.values()]
    buffer = torch.cat([torch.zeros(3).to(next(iter(weights.values()))), *map(torch.flatten, weights.values())])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(weights.items(), buffer[3:].split(sizes))}


def some_matrices():
    shapes = {"a": (20, 8), "b": (33,), "none": (0, 4), "c": (), "d": (5, 3, 7), "e": (700, 8), "f": (9,), "g": (2, 2)}
    return {name: torch.randn(shape).mul(0.02).bfloat16() for name, shape in shapes.items()}


def push_between_buffers(device, is_joined_there, is_joined_here):
    """Pushes from and to weights that are views of one buffer, or not. Joined regions of views are not copied."""
    matrices = {name: tensor.to(device) for name, tensor in some_matrices().items()}
    there, here = (
        in_one_buffer(matrices) if is_joined else copies(matrices) for is_joined in (is_joined_there, is_joined_here)
    )
    sender, receiver = Sender(there, piece_bytes=1 << 16), Receiver(here)
    joined, alone = sorted(sender._regions(there), key=lambda region: region.nbytes)
    assert alone.values().data_ptr() == there["e"].data_ptr() and joined.nbytes == 2 * (160 + 33 + 1 + 105 + 9 + 4)
    assert joined.is_gathered  # "e" lies between the others
    for share in (0.05, 1, 0, 0.05):
        for tensor in there.values():
            tensor.copy_(changed(tensor.cpu(), share, 2))
        assert applied(receiver, sender.push(there))
        assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))
    del there["e"], here["e"]  # whose place in the buffer is now a gap
    there, here = (
        in_one_buffer(weights) if is_joined else copies(weights)
        for weights, is_joined in ((there, is_joined_there), (here, is_joined_here))
    )
    sender, receiver = Sender(there, piece_bytes=1 << 16), Receiver(here)
    (region,) = sender._regions(there)
    assert region.is_gathered != is_joined_there
    assert (region.values().data_ptr() == there["a"].data_ptr()) == is_joined_there
    train(there) if device == "cpu" else train_on_gpu(there, 0.05)
    before, messages = copies(here), sender.push(there)
    assert applied(receiver, messages)
    assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))
    ((base,),) = receiver._bases.values()
    assert isinstance(base, torch.Tensor) == is_joined_here
    again, wrong = Receiver(here), copies(here)
    with pytest.raises(OutOfSyncError, match="a, joined with 6 others, has fingerprint"):
        again.apply(messages[0])
    assert_same_weights(copies_on_cpu(here), copies_on_cpu(wrong))
    for name, tensor in here.items():
        tensor.copy_(before[name])
    assert again.apply(messages[0])
    assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))


def test_a_joined_tensor_that_is_not_contiguous_among_empty_ones():
    """What is left of the region is not contiguous, and the message has its elements in a row."""
    there = {"a": torch.randn(6, 4).t(), "b": torch.empty(0), "c": torch.empty(3, 0)}
    here = {name: torch.zeros(tensor.shape) for name, tensor in there.items()}
    sender, receiver = Sender(), Receiver(here)
    for _ in range(3):
        assert [receiver.apply(message) for message in sender.push(there)] == [True]
        assert_same_bits(here["a"], there["a"])
        there["a"][0, 1] += 1


def test_offloaded_parameters_are_sent_with_their_values():
    """Weights that rest share memory, which has no values."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).bfloat16().requires_grad_(False)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    here = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with ibp.offload(model, "cpu", resident_bytes=0, min_bytes=0):
        messages = Sender().push(model.named_parameters())
    assert [Receiver(here).apply(message) for message in messages] == [True]
    for name, tensor in wanted.items():
        assert_same_bits(here[name], tensor)


@pytest.mark.parametrize("use", [lambda weights: Sender().push(weights), Receiver], ids=["Sender", "Receiver"])
def test_tensors_without_readable_memory_are_refused(use):
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16().requires_grad_(False)
    ibp.nn.compress(model, min_bytes=0)
    with pytest.raises(TypeError, match="weight is a TableParameter without memory of its own"):
        use(dict(model.named_parameters()))
    turned = torch.randn(2, 3, dtype=torch.complex64).conj()
    for tensor in (turned, turned.imag):
        with pytest.raises(TypeError, match="x is a conjugated or negated view; wanted its resolve_conj"):
            use({"x": tensor})


@pytest.mark.parametrize("is_joined_here", [False, True])
@pytest.mark.parametrize("is_joined_there", [False, True])
def test_views_of_one_buffer(is_joined_there, is_joined_here):
    push_between_buffers("cpu", is_joined_there, is_joined_here)


def test_weights_in_another_order_than_their_buffer():
    """Only neighbours in order become one tensor; a weight that moves out of the buffer is copied again. A tensor
    without elements stands in nobody's way, wherever its storage is."""
    weights = in_one_buffer({name: torch.full((2, 3), float(number)) for number, name in enumerate("abcd")})
    order = {"b": weights["b"], "none": weights["b"][:0], "c": weights["c"], "d": weights["d"], "a": weights["a"]}
    sender = Sender()
    (region,) = sender._regions(order)
    assert [extent.size for extent in region.extents] == [(18,), (6,)]
    order["none"] = torch.empty(0, 3)
    (region,) = sender._regions(order)
    assert region.values().tolist() == [1.0] * 6 + [2.0] * 6 + [3.0] * 6 + [0.0] * 6
    order["c"] = order["c"].clone()
    (region,) = sender._regions(order)
    assert [extent.size for extent in region.extents] == [(6,)] * 4
    assert region.values().tolist() == [1.0] * 6 + [2.0] * 6 + [3.0] * 6 + [0.0] * 6


def test_a_part_of_a_push_is_not_the_whole():
    """A count of one makes a message the whole push; the rows that it lacks tell."""
    there = {"w": torch.randn(64, 48)}
    here, sender = copies(there), Sender(there, piece_bytes=5000)
    there["w"] += 1
    first, *_ = sender.push(there)
    receiver, before = Receiver(here), copies(here)
    with pytest.raises(OutOfSyncError, match="the first 24 of 64 rows of w alone"):
        receiver.apply(with_head(first, field("piece", ["tuple", [0, 1]])))
    assert_same_weights(here, before)


@pytest.mark.parametrize("full", [False, True])
def test_a_result_that_a_change_does_not_have(full):
    """Each tensor that comes is compared with the fingerprint that its message names, before one is written."""
    link = Link(1 << 20)
    (message,) = link.sender.push(link.there, full=True) if full else link.pushes[1]

    def change(form):
        (_, regions) = form[2][PushHead._fields.index("regions")]
        regions[-1][2][Region._fields.index("result")] ^= 1
        return form

    match = "would not become the tensor with fingerprint .*: the message is damaged"
    link.refuses([with_head(message, change)], match, ibp.CorruptTableError)
    assert link.receiver.apply(message)


def places_in(form):
    """(list, index) of everything in a JSON value."""
    for index, held in enumerate(form):
        yield form, index
        if isinstance(held, list):
            yield from places_in(held)


OTHER_VALUES = [None, True, -1, 0, 1, 5, 2**40, 2**70, 0.5, "w", [], {}, ["tuple", []], ["bytes", 0], ["dtype", "int8"]]
OTHER_VALUES += [["size", [3]], ["list", []], ["dict", []], ["tensor", "uint8", [0], 0]]


@pytest.mark.slow
@hypothesis.given(st.integers(0, 1 << 20), st.sampled_from(OTHER_VALUES), st.booleans(), st.integers(0, 2))
@hypothesis.settings(max_examples=30)  # each learns several codebooks
def test_any_head(place, value, full, number):
    """Whatever a head says, the weights are one version or the other, and errors are those that are documented."""
    there = {"a": torch.arange(60.0).view(20, 3), "b": torch.arange(7).bfloat16()}
    here, sender = copies(there), Sender(there, piece_bytes=100)
    old, receiver = copies(there), Receiver(here)
    there["a"] += 1
    messages = sender.push(there, full=full)

    def change(form):
        held, index = list(places_in(form))[place % len(list(places_in(form)))]
        held[index] = value
        return form

    messages[number] = with_head(messages[number], change)
    try:
        is_done = applied(receiver, messages)
    except (KeyError, TypeError, ValueError):
        is_done = False
    assert_same_weights(here, there if is_done else old)


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 100, -1])
def test_messages_that_are_cut_off(cut):
    link = Link(1 << 20)
    link.refuses([link.pushes[1][0][:cut]], "wanted|not from an", ibp.CorruptTableError)


def test_what_is_no_message():
    link = Link()
    link.refuses([b"bytes"], "a bytes; wanted a torch.uint8", TypeError)
    link.refuses([torch.zeros(9)], r"torch.float32 \[9\]", TypeError)
    (message,) = link.pushes[1][:1]
    around = torch.zeros(2 * len(message), dtype=torch.uint8)
    around[::2] = message
    assert not link.receiver.apply(around[::2]), "strided, and not aligned"


@pytest.mark.parametrize(
    ("name", "there", "kind", "match"),
    [
        ("w", torch.zeros(4, 6), TypeError, "w has dtype torch.bfloat16; the message is for torch.float32"),
        ("w", torch.zeros(4, 7).bfloat16(), ValueError, r"w has shape \[4, 6\]; the message is for \[4, 7\]"),
        ("v", torch.zeros(4, 6).bfloat16(), KeyError, "no tensor 'v'"),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_weights_of_another_kind(name, there, kind, match, full):
    here = {"a": torch.zeros(3), "w": torch.zeros(4, 6).bfloat16()}
    sender = Sender({"a": torch.zeros(3), name: there})
    messages = sender.push({"a": torch.ones(3), name: there + 1}, full=full)
    with pytest.raises(kind, match=match):
        Receiver(here).apply(*messages)
    assert not here["a"].any() and not here["w"].any()


@pytest.mark.parametrize("number", range(4))
def test_a_crash_in_the_middle(number, monkeypatch):
    """Amid the changes of the tensors, all stay as they were, and the messages count when they come again."""
    link, calls, add = Link(), [], _applying.HostBatch._add

    def interrupted(self, subtracts):
        calls.append(subtracts)
        if len(calls) - 1 == number:
            raise KeyboardInterrupt
        return add(self, subtracts)

    monkeypatch.setattr(_applying.HostBatch, "_add", interrupted)
    link.refuses(link.pushes[1], None, KeyboardInterrupt)
    assert link.receiver.version == 1
    assert applied(link.receiver, link.pushes[1])
    assert_same_weights(link.here, link.versions[2])


class HalfReceiver(ibp.deltas.PlacedReceiver):
    """Keeps the first half of the columns of each matrix, so it cannot compute fingerprints of what the sender has."""

    def __init__(self, halves):
        super().__init__()
        self.halves = halves

    def places_of(self, tensors):
        boxes = {name: ((0, shape[0]), (0, shape[1] // 2)) for name, (shape, _) in tensors.items()}
        return {name: [ibp.deltas.ShardPlace(self.halves[name], 0, box)] for name, box in boxes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "halves", "tables"])
def test_a_push_that_is_interrupted_anywhere_is_applied_once(kind):
    """What of it comes again is taken or is refused by name, and the next push finds its base."""

    def made(weights):
        if kind == "tables":
            return coded(weights)
        return {
            name: weight[:, : weight.shape[1] // (2 if kind == "halves" else 1)].clone()
            for name, weight in weights.items()
        }

    new, base = matrices(2)
    newer = {name: changed(weight, 0.01, 1) for name, weight in new.items()}
    sender = Sender(base, piece_bytes=30_000)
    pushes = [sender.push(new), sender.push(newer)]
    assert len(pushes[0]) > 1
    here = {}

    def interrupted(moment):
        """(the receiver, whether the call for the last message was interrupted at this moment)"""
        here.update(made(base))
        receiver = HalfReceiver(here) if kind == "halves" else Receiver(here)
        for message in pushes[0][:-1]:
            receiver.apply(message)
        _, interrupts = interrupt_at(moment, None, lambda: receiver.apply(pushes[0][-1]))
        return receiver, bool(interrupts)

    end = bisect.bisect_left(range(1 << 15), True, key=lambda moment: not interrupted(moment)[1])
    assert 1000 < end < 1 << 15
    outcomes = set()
    for moment in (*range(0, end, 997), *range(end - 30, end)):
        receiver, _ = interrupted(moment)
        outcomes.add(receiver.version)
        for message in pushes[0]:
            try:
                receiver.apply(message)
            except OutOfSyncError as error:
                assert "came again" in str(error) and "leave it out" in str(error)
        assert receiver.version == 1
        assert_same_weights(plain(here), made(new) if kind == "halves" else new)
        assert applied(receiver, pushes[1])
        assert_same_weights(plain(here), made(newer) if kind == "halves" else newer)
    assert outcomes == {None, 1}


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_push_of_old_and_new_names_is_interrupted(is_copied, monkeypatch):
    """While new names are copied, after the deltas of the others: all weights are old, or all are new."""
    before = {"old": torch.randn(200, 64), "new": torch.randn(200, 64).bfloat16()}
    after = {"old": changed(before["old"], 0.01, 1), "new": before["new"] + 1}
    here, copy_all = {name: weight.clone() for name, weight in before.items()}, _applying.staging.copy_all
    (message,) = Sender({"old": before["old"]}).push(after)
    receiver = Receiver(here)

    def interrupted(targets, sources):
        if any(to.data_ptr() == here["new"].data_ptr() for to in targets):
            if is_copied:
                copy_all(targets, sources)
            raise KeyboardInterrupt
        copy_all(targets, sources)

    with monkeypatch.context() as patch:
        patch.setattr(_applying.staging, "copy_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            receiver.apply(message)
    assert receiver.version == (1 if is_copied else None)
    assert_same_weights(here, after if is_copied else before)
    if not is_copied:
        assert receiver.apply(message)
    assert_same_weights(here, after)


def plain(weights):
    return {
        name: weight if isinstance(weight, torch.Tensor) else weight.decompress() for name, weight in weights.items()
    }


def test_a_push_that_fails_sends_all_next(monkeypatch):
    link = Link()
    monkeypatch.setattr(link.sender, "_message", lambda *args: 1 / 0)
    train(link.there)
    with pytest.raises(ZeroDivisionError):
        link.sender.push(link.there)
    monkeypatch.undo()
    assert applied(link.receiver, link.pushes[1]) and applied(link.receiver, link.pushes[2])
    assert applied(link.receiver, link.sender.push(link.there))
    assert_same_weights(link.here, link.there)


# ---- coded weights ----


def coded(weights):
    return {name: ibp.compress(tensor, level="fast", layout="slots", device="cpu") for name, tensor in weights.items()}


def matrices(count=3):
    new, base = zip(*(optimizer_step((96, 256), 1e-6) for _ in range(count)))
    return dict(zip("abc", new)), dict(zip("abc", base))


def assert_tables_hold(tables, wanted):
    for name, tensor in wanted.items():
        assert_same_bits(tables[name].decompress(), tensor)


def test_tables():
    new, base = matrices()
    tables = coded(base)
    slots = {name: table.slots.data_ptr() for name, table in tables.items()}
    sender, receiver = Sender(base, piece_bytes=9000), Receiver(tables)
    assert applied(receiver, sender.push(new))
    assert_tables_hold(tables, new)
    assert applied(receiver, sender.push(base, full=True))
    assert_tables_hold(tables, base)
    assert slots == {name: table.slots.data_ptr() for name, table in tables.items()}


@pytest.mark.parametrize("full", [False, True])
def test_a_table_without_dimensions(full):
    old, new = {"a": torch.tensor(3.0)}, {"a": torch.tensor(4.0)}
    tables = {"a": ibp.compress(old["a"], device="cpu")}
    assert applied(Receiver(tables), Sender(old).push(new, full=full))
    assert_tables_hold(tables, new)


def test_a_delta_of_other_rows_leaves_all_tables():
    new, base = matrices()
    tables = coded(base | {"c": new["c"]})
    with pytest.raises(OutOfSyncError, match="c has fingerprint"):
        applied(Receiver(tables), Sender(base, piece_bytes=9000).push(new))
    assert_tables_hold(tables, base | {"c": new["c"]})


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_amid_tables(number, after, monkeypatch):
    new, base = matrices()
    tables, calls, write = coded(base), [], BasePart.write_items
    receiver, messages = Receiver(tables), Sender(base, piece_bytes=9000).push(new)

    def interrupted(self, items):
        calls.append(self)
        if len(calls) - 1 == number:
            if after:
                write(self, items)
            raise KeyboardInterrupt
        write(self, items)

    monkeypatch.setattr(BasePart, "write_items", interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied(receiver, messages)
    assert_tables_hold(tables, base)
    assert applied(receiver, messages)
    assert_tables_hold(tables, new)


def interrupt_a_write(monkeypatch, number, after):
    """Raises KeyboardInterrupt at the write of this number, before or after it. Returns the groups that are written, a
    list that grows."""
    calls, write = [], _applying.SplitBase.write

    def interrupted(base, group, elements):
        calls.append(group)
        if len(calls) - 1 != number or after:
            write(base, group, elements)
        if len(calls) - 1 == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(_applying.SplitBase, "write", interrupted)
    return calls


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_amid_joined_tables_and_tensors(number, after, monkeypatch):
    new, base = matrices()
    here = coded(base) | {"c": base["c"].clone()}
    receiver, messages = Receiver(here), Sender(base).push(new)
    calls = interrupt_a_write(monkeypatch, number, after)
    with pytest.raises(KeyboardInterrupt):
        applied(receiver, messages)
    assert_tables_hold({name: here[name] for name in "ab"}, {name: base[name] for name in "ab"})
    assert_same_bits(here["c"], base["c"])
    assert applied(receiver, messages) and len(calls) > 3
    assert_tables_hold({name: here[name] for name in "ab"}, {name: new[name] for name in "ab"})
    assert_same_bits(here["c"], new["c"])


# ---- shards ----


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    two = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield two
    two.end()


SHAPES = {"a": (7, 30), "b": (1, 50), "c": (64, 16), "d": (33,)}
PLACED = {"a": [Shard(0)], "b": [Shard(0)], "c": [Shard(1)], "d": [Replicate()]}


def sharded(version):
    """DTensors, and one plain tensor on both ranks."""
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    weights = {name: tensor + (torch.arange(tensor.shape[0]) % 3 == version)[(...,) + (None,) * (tensor.dim() - 1)]
               for name, tensor in weights.items()}  # fmt: skip
    mesh = init_device_mesh("cpu", (2,))
    found = {name: distribute_tensor(tensor, mesh, PLACED[name]) for name, tensor in weights.items()}
    return found | {"e": torch.full((3,), float(version))}, weights | {"e": torch.full((3,), float(version))}


def push_shards(rank):
    """Messages of three versions, and the last one's weights."""
    with pytest.raises(ValueError, match="a is a DTensor of 2 ranks"):
        Sender(sharded(0)[0])
    sender, pushes = Sender(part=(rank, 2), piece_bytes=300), []
    for version in range(3):
        there, whole = sharded(version)
        pushes.append(sender.push(there))
    return pushes, whole


def test_shards(two_ranks):
    pushed, wholes = zip(*two_ranks(push_shards))
    here = {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()} | {"e": torch.zeros(3)}
    receiver, rng = Receiver(here), random.Random(0)
    for version in range(3):
        of_both = [message for pushes in pushed for message in pushes[version]]
        assert applied(receiver, rng.sample(of_both, len(of_both)))
    assert_same_weights(here, wholes[0])
    with pytest.raises(OutOfSyncError):
        receiver.apply(pushed[1][1][0])


def test_senders_that_do_not_agree():
    first, second = ({"a": torch.full((3,), float(rank))} for rank in range(2))
    receiver = Receiver({"a": torch.zeros(3)})
    assert not receiver.apply(*Sender(part=(0, 2)).push(first))
    with pytest.raises(ValueError, match="two senders have sent a, and not the same"):
        receiver.apply(*Sender(part=(1, 2)).push(second))


def push_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(31, 17), torch.nn.Linear(17, 5)).bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    sender = Sender(part=(rank, 2))
    pushes = [sender.push(model)]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    pushes.append(sender.push(model))
    return pushes, {name: weight.full_tensor() for name, weight in model.state_dict().items()}


def test_fsdp2(two_ranks):
    (first, whole), (second, _) = two_ranks(push_fsdp)
    here = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    receiver = Receiver(here)
    for version in range(2):
        assert applied(receiver, first[version] + second[version])
    assert_same_weights(here, whole)


# ---- GPUs ----


@pytest.mark.parametrize("memory", ["device", "pinned"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_gpu(cuda, memory, where):
    there = {name: tensor.cuda() for name, tensor in some_weights().items()}
    here = {name: tensor.clone() for name, tensor in there.items()}
    sender, receiver = Sender(there, memory=memory, piece_bytes=5000, device=where), Receiver(here)
    for share in (0.02, 0, 1):
        train_on_gpu(there, share)
        messages = sender.push(there)
        assert {message.device.type for message in messages} == {where}
        assert applied(receiver, messages)
        assert_same_weights({name: tensor.cpu() for name, tensor in here.items()}, copies_on_cpu(there))
    damaged = sender.push(there)[0].clone()
    damaged[-1] ^= 1
    with pytest.raises(ibp.CorruptTableError):
        receiver.apply(damaged)


def some_experts():
    experts = torch.randn(200, 32, 64).mul(0.02).bfloat16().cuda()
    return {f"experts.{number}": expert.clone() for number, expert in enumerate(experts)}


@pytest.mark.parametrize("share", [0.02, 0.4])
def test_joined_tensors_on_a_gpu(cuda, share):
    there = some_experts()
    here, sender = copies(there), Sender(there, piece_bytes=100_000)
    receiver = Receiver(here)
    for _ in range(3):
        train_on_gpu(there, share)
        messages = sender.push(there)
        assert len(messages) > 5 and applied(receiver, messages)
        assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))
    here["experts.170"][3] += 1
    before = copies_on_cpu(here)
    train_on_gpu(there, share)
    with pytest.raises(OutOfSyncError, match="experts.* has fingerprint"):
        applied(receiver, sender.push(there))
    assert_same_weights(copies_on_cpu(here), before)
    assert applied(receiver, sender.push(there, full=True))
    assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))


@pytest.mark.parametrize("is_joined_here", [False, True])
@pytest.mark.parametrize("is_joined_there", [False, True])
def test_views_of_one_buffer_on_a_gpu(cuda, is_joined_there, is_joined_here):
    push_between_buffers("cuda", is_joined_there, is_joined_here)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_amid_joined_tensors_on_a_gpu(cuda, number, after, monkeypatch):
    there = some_experts()
    here = copies(there)
    before, sender, receiver = copies_on_cpu(here), Sender(there, piece_bytes=400_000), Receiver(here)
    train_on_gpu(there, 0.02)
    messages = sender.push(there)
    interrupt_a_write(monkeypatch, number, after)
    with pytest.raises(KeyboardInterrupt):
        applied(receiver, messages)
    assert_same_weights(copies_on_cpu(here), before)
    assert applied(receiver, messages)
    assert_same_weights(copies_on_cpu(here), copies_on_cpu(there))


def train_on_gpu(weights, share):
    for tensor in weights.values():
        tensor.copy_(changed(tensor.cpu(), share, 2))


def copies_on_cpu(weights):
    return {name: tensor.cpu() for name, tensor in weights.items()}


def test_tables_on_a_gpu(cuda):
    new, base = matrices()
    tables = {name: ibp.compress(tensor.cuda(), level="fast", layout="slots") for name, tensor in base.items()}
    assert applied(Receiver(tables), Sender(base, piece_bytes=9000).push(new))
    assert_tables_hold({name: table.cpu() for name, table in tables.items()}, new)
