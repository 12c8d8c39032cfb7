"""A product of which one slice is read is made for that slice, and for nothing else."""

import pytest
import torch
import torch.nn.functional as F

from memo_compile.passes.slice_first import SliceFirst

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 6, 8, 32


def loss_of(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def with_ellipsis(x, weight, labels):
    logits = F.linear(x, weight).float()
    shifted = logits[..., :-1, :].contiguous()
    return loss_of(shifted.view(-1, VOCABULARY), labels[..., 1:].contiguous())


def narrowed(x, weight, labels):
    logits = torch.tanh((x @ weight.t()) / 30) * 30
    return loss_of(logits.narrow(1, 0, TOKENS - 1), labels[:, 1:])


def narrowed_from_the_end(x, weight, labels):
    return loss_of(F.linear(x, weight).narrow(1, -2, 2), labels[:, -2:])


def sliced_twice(x, weight, labels):
    logits = F.linear(x, weight)
    z = logits[:, :-1].logsumexp(-1).square().mean()
    return loss_of(logits[:, :-1], labels[:, 1:]) + z


def of_two_products(x, weight, labels):
    logits = F.linear(x, weight) + F.linear(x.sin(), weight) + torch.ones(BATCH, 1, 1)
    return loss_of(logits[:, 1:4:2], labels[:, 1:4:2])


def one_sequence(x, weight, labels):
    return loss_of(F.linear(x, weight)[0, :-1], labels[0, 1:])


def last_token(x, weight, labels):
    return loss_of(F.linear(x, weight)[:, -1], labels[:, 0])


def with_new_dimensions(x, weight, labels):
    return loss_of(F.linear(x, weight)[None, :, None, :-1, :], labels[:, 1:])


def flat(x, weight, labels):
    logits = torch.mm(x.view(-1, WIDTH), weight.t())
    return loss_of(logits[3:], labels.view(-1)[3:])


def written_afterwards(x, weight, labels):
    shifted = F.linear(x, weight)[:, :-1]
    shifted[:, 0] = 0.5
    return loss_of(shifted, labels[:, 1:])


MOVED = (
    with_ellipsis,
    narrowed,
    narrowed_from_the_end,
    sliced_twice,
    of_two_products,
    one_sequence,
    last_token,
    with_new_dimensions,
    flat,
    written_afterwards,
)


def read_whole(x, weight, labels):
    logits = F.linear(x, weight)
    return loss_of(logits[:, :-1], labels[:, 1:]) + logits.square().mean()


def of_the_vocabulary(x, weight, labels):
    logits = F.linear(x, weight)[:, :-1, : VOCABULARY // 2]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten() % (VOCABULARY // 2))


def two_slices(x, weight, labels):
    logits = F.linear(x, weight)
    return loss_of(logits[:, :-1], labels[:, 1:]) + loss_of(logits[:, :-2], labels[:, 2:])


def no_product(x, weight, labels):
    return loss_of(F.linear(x, weight).softmax(1)[:, :-1], labels[:, 1:])


def narrow_product(x, weight, labels):
    return F.linear(x, weight[:2])[:, :-1].square().sum()


def without_gradients(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        seen = logits[:, :-1]
    return seen.mean() + x.sum()


def by_positions(x, weight, labels):
    return loss_of(F.linear(x, weight)[:, torch.tensor([0, 2])], labels[:, :2])


LEFT = (
    read_whole,
    of_the_vocabulary,
    two_slices,
    no_product,
    narrow_product,
    without_gradients,
    by_positions,
)


def rewritten(function):
    """The function by the rewritten graph, its gradients, and whether the pass changed it."""
    torch._dynamo.reset()
    modified = []

    def backend(gm, _):
        modified.append(SliceFirst()(gm).modified)
        gm.graph.lint()
        gm.recompile()
        return gm

    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    inputs = x, weight, torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        loss = run(*inputs)
        yield loss, *torch.autograd.grad(loss, inputs[:2], allow_unused=True)
    yield modified


@pytest.mark.parametrize("function", [*MOVED, *LEFT], ids=lambda function: function.__name__)
def test_numbers_are_those_of_the_program(function):
    expected, made, modified = rewritten(function)
    torch.testing.assert_close(made, expected)
    assert modified == [function in MOVED]
