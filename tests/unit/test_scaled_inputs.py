"""Which dimensions of a step's inputs vary together, and the inputs with other sizes."""

import pytest
import torch

from memo_compile.errors import InputError
from memo_compile.offline.fit_question import Vary
from memo_compile.offline.scaled_inputs import Arguments


def of(**kwargs):
    return Arguments(args=(), kwargs=kwargs, names=())


def dims(arguments, what):
    varied = arguments.varied(what)
    return None if varied is None else (varied.size, str(varied))


def ids(*shape):
    return torch.zeros(shape, dtype=torch.long)


def test_token_numbers_have_a_batch_and_a_sequence():
    given = of(input_ids=ids(2, 64), labels=ids(2, 64))
    assert dims(given, Vary.BATCH) == (2, "input_ids[0], labels[0]")
    assert dims(given, Vary.SEQUENCE) == (64, "input_ids[1], labels[1]")


def test_a_batch_as_long_as_its_sequence_stays_apart():
    given = of(input_ids=ids(64, 64), labels=ids(64))
    assert dims(given, Vary.BATCH) == (64, "input_ids[0], labels[0]")
    assert dims(given, Vary.SEQUENCE) == (64, "input_ids[1]")


def test_masks_and_positions_follow_the_sequence():
    given = of(
        ids=ids(2, 8),
        padding=torch.ones(2, 8),
        causal=torch.zeros(2, 1, 8, 8),
        chosen=torch.ones(2, 8, 8, dtype=torch.bool),
        positions=ids(8),
        shared=ids(1, 8),
    )
    assert dims(given, Vary.SEQUENCE) == (
        8,
        "ids[1], padding[1], causal[2], causal[3], chosen[1], chosen[2], positions[0], shared[1]",
    )
    assert dims(given, Vary.BATCH) == (2, "ids[0], padding[0], causal[0], chosen[0]")


def test_hidden_states_have_a_sequence_and_pictures_have_none():
    assert dims(of(x=torch.zeros(2, 8, 8)), Vary.SEQUENCE) == (8, "x[1]")
    pictures = of(pixels=torch.zeros(4, 3, 8, 8), kinds=ids(4))
    assert dims(pictures, Vary.SEQUENCE) is None
    assert dims(pictures, Vary.BATCH) == (4, "pixels[0], kinds[0]")


def test_a_picture_beside_tokens_keeps_its_size():
    given = of(ids=ids(2, 8), pixels=torch.zeros(2, 3, 8, 8))
    assert dims(given, Vary.SEQUENCE) == (8, "ids[1]")


def test_numbers_alone_have_neither():
    given = of(scale=torch.tensor(2.0), count=3)
    assert [dims(given, what) for what in Vary] == [None, None]


def test_other_sizes_reach_what_lists_and_dicts_hold_and_keep_the_rest():
    inner = {"ids": ids(2, 8), "name": "a"}
    given = Arguments(args=(inner, [ids(2, 8), 8]), kwargs={"w": 8}, names=("batch", "more"))
    varied = given.varied(Vary.SEQUENCE)
    longer = given.with_size(varied, 12)
    assert longer.args[0]["ids"].shape == (2, 12)
    assert longer.args[0]["ids"].dtype is torch.long
    assert longer.args[0]["name"] == "a"
    assert longer.args[1][0].shape == (2, 12)
    assert longer.kwargs == {"w": 8}
    assert given.args[0]["ids"].shape == (2, 8)
    assert given.bytes_with(varied, 12) == 2 * 2 * 12 * 8
    assert list(given.numbers_like(8)) == ["more.1", "w"]


def test_a_gradient_that_inputs_need_stays_needed():
    given = of(x=torch.zeros(2, 8, 4, requires_grad=True))
    longer = given.with_size(given.varied(Vary.BATCH), 3)
    assert longer.kwargs["x"].requires_grad


def test_dimensions_can_be_named():
    given = of(x=torch.zeros(2, 5), y=torch.zeros(5))
    varied = given.named(Vary.SEQUENCE, "x:1, y:0")
    assert (varied.size, str(varied)) == (5, "x[1], y[0]")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("z:1", r"dims: expected NAME:DIM of x 2 x 5, y 5, got 'z:1'"),
        ("x", r"expected NAME:DIM .* got 'x'"),
        ("x:2", r"dims: x has shape 2 x 5, no 2"),
        ("x:0,x:1", r"dims: sizes differ \(2, 5\): x:0,x:1"),
    ],
)
def test_wrong_dimensions_are_named(text, says):
    given = of(x=torch.zeros(2, 5), y=torch.zeros(5))
    with pytest.raises(InputError, match=says):
        given.named(Vary.SEQUENCE, text)
