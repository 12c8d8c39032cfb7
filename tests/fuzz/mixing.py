"""Pieces that move entries or mix tokens and samples: scatters, sorts, cumulative sums, shapes."""

from tests.fuzz.grammar import Fragment, Kind, Sizes, same, some_tokens

_DIM = same("1", "-1", "0")


def _wide(sizes: Sizes) -> bool:
    return sizes.width > 1


_SOURCE = "self.${p}(h)[: at.shape[0], : at.shape[1], : at.shape[2]]"
"""Eager torch has no gradient for a source that is larger than the index."""

_SCATTER_AT = {
    "one_row": "torch.zeros(1, 1, W, dtype=torch.int64)",
    "one_sample": "torch.arange(max(1, T // 2)).flip(0).view(1, -1, 1).expand(1, -1, W)",
    "all": "torch.arange(T).flip(0).view(1, -1, 1).expand(B, T, W)",
    "narrow": "torch.arange(T).flip(0).view(1, -1, 1).expand(B, T, 1)",
}
_ADD_AT = {
    **_SCATTER_AT,
    "collide": "torch.zeros(B, T, W, dtype=torch.int64)",
    "from_ids": "(ids % T).unsqueeze(-1).expand(B, T, W)",
}

_READ = {
    "amax": "v - v.amax($dim, keepdim=True)",
    "amin": "v * v.amin($dim, keepdim=True).tanh()",
    "aminmax": "v / (torch.sub(*torch.aminmax(v, dim=$dim, keepdim=True)) - 1)",
    "largest": "v / (v.max() - v.min() + 1)",
    "norm": "v / (1 + torch.linalg.vector_norm(v, float('inf'), $dim, keepdim=True))",
    "by_hand": "v - ((v - v.amax($dim, keepdim=True)).exp().sum($dim, keepdim=True).log()"
    " + v.amax($dim, keepdim=True))",
    "from_largest": "(v - v.amax($dim, keepdim=True)).abs()",
    "clamped": "v.clamp(max=0.5 * v.amax().detach())",
    "max": "v - v.max($dim, keepdim=True).values",
    "median": "v - v.median($dim, keepdim=True).values",
    "kthvalue": "v - v.kthvalue(1, $dim, keepdim=True).values",
    "sorted": "v.sort($dim).values + v",
    "ranked": "v * v.argsort($dim).to(v.dtype) / T",
    "cummax": "v.cummax($dim).values",
    "equal": "(v == v.amax($dim, keepdim=True)).to(v.dtype) * v + h",
    "topk": "torch.where(v >= v.topk(1, $dim).values, v, 0.1 * v)",
    "one_hot": "F.one_hot(v.argmax(-1), W).to(v.dtype) * v + h",
    "scattered": "v + v.new_zeros(B, 1, W)"
    '.scatter_reduce(1, torch.zeros(B, T, W, dtype=torch.int64), v, "amax")',
    "reduced": "v + v.new_zeros(B, 1, W)"
    '.index_reduce(1, torch.zeros(T, dtype=torch.int64), v, "amax")',
    "maximum": "torch.maximum(v, v.roll(1, $dim))",
    "above_mean": "torch.where(v > v.mean($dim, keepdim=True), v, 0.5 * v)",
    "rounded": "v * (v + ((v * 8).round() / 8 - v).detach())",
    "floored": "v * torch.div(v, 0.25, rounding_mode='floor')",
    "gated": "v * (v > 0.3).to(v.dtype)",
    "bucketed": "v * torch.bucketize(v.detach(), torch.arange(-2.0, 2.0).to(v.dtype))",
}
"""What reads ``v`` for equality, order or an index, or rounds it: a last digit decides."""

KINDS = {
    "read": Kind(
        init="""
self.${p}_up = nn.Linear(W, 1024, bias=False)
self.${p}_down = nn.Linear(1024, W, bias=False)
""",
        body="v = self.${p}_down(F.gelu(self.${p}_up(h)))\ny = $form",
        options={"form": _READ, "dim": _DIM},
        allowed=lambda sizes: sizes.width >= 256,
    ),
    "conv": Kind(
        init="self.${p} = nn.Conv1d(W, W, $kernel, groups=$groups, padding=$kernel - 1)",
        body="y = self.${p}(h.transpose(1, 2))[..., :T].transpose(1, 2)",
        options={"kernel": same("1", "2", "3"), "groups": same("1", "W", "H")},
        weight=3,
    ),
    "scatter": Kind(
        init="self.${p} = nn.Linear(W, W)",
        body=f"at = $at\ny = h.scatter(1, at, {_SOURCE})",
        options={"at": _SCATTER_AT},
        weight=2,
    ),
    "scatter_value": Kind(
        body="y = h.scatter($dim, $at, 0.5)",
        options={
            "dim": same("1", "0", "2"),
            "at": {
                "one": "torch.zeros(1, 1, W, dtype=torch.int64)",
                "column": "torch.zeros(B, T, 1, dtype=torch.int64)",
                "row": "torch.zeros(1, T, W, dtype=torch.int64)",
            },
        },
    ),
    "scatter_add": Kind(
        init="self.${p} = nn.Linear(W, W)",
        body=f"at = $at\nsource = {_SOURCE}\ny = $form",
        options={
            "at": _ADD_AT,
            "form": {
                "scatter_add": "h.scatter_add(1, at, source)",
                "into_zeros": "torch.zeros_like(h).scatter_add(1, at, source)",
                "sum": 'h.scatter_reduce(1, at, source, "sum")',
                "mean": 'h.scatter_reduce(1, at, source, "mean")',
                "amax": 'h.scatter_reduce(1, at, source, "amax")',
                "amin": 'h.scatter_reduce(1, at, source, "amin", include_self=False)',
            },
        },
        weight=3,
        sharp=True,
    ),
    "gather": Kind(
        body="y = $form",
        options={
            "form": {
                "tokens": "h.gather(1, (ids % T).unsqueeze(-1).expand(B, T, W))",
                "one": "h.gather(1, torch.zeros(1, 1, W, dtype=torch.int64)) + h",
                "entries": "h.gather(2, (ids % W).unsqueeze(-1)) * h",
                "samples": "h.gather(0, (ids % B).unsqueeze(-1).expand(B, T, W))",
                "take_along": "h.take_along_dim((ids % T).unsqueeze(-1), 1)",
                "select": "h.index_select(1, torch.arange(T).flip(0))",
                "samples_select": "h.index_select(0, torch.arange(B).flip(0))",
                "indexed": "h[torch.arange(B)[:, None], ids % T]",
                "indexed_samples": "h[torch.arange(B).flip(0)]",
                "indexed_tokens": "h[:, torch.arange(T).flip(0)]",
                "indexed_mask": "h[:, ids[0] % T] * 0.5",
            }
        },
        weight=3,
    ),
    "sort": Kind(
        body="$form",
        options={
            "form": {
                "sort": "y = h.sort($dim).values",
                "stable": "y = torch.sort(h, dim=$dim, stable=True, descending=True)[0]",
                "argsort": "y = h.gather($dim, h.argsort($dim)) * h",
                "topk_one": "y = h.topk(1, $dim).values * h",
                "topk_all": "y = h.topk(h.shape[$dim], $dim)[0]",
                "kthvalue": "y = h - h.kthvalue(1, $dim, keepdim=True).values",
                "median": "y = h - h.median($dim, keepdim=True).values",
                "max": "y = h * h.max($dim, keepdim=True).values",
                "argmax": "y = h + h.argmax($dim, keepdim=True)",
                "aminmax": "low, high = torch.aminmax(h, dim=$dim, keepdim=True)\n"
                "y = h / (high - low + 1)",
            },
            "dim": _DIM,
        },
        sharp=True,
        weight=4,
    ),
    "cumulate": Kind(
        body="y = $form",
        options={
            "form": {
                "cumsum": "h.cumsum($dim) * 0.3",
                "cumprod": "(h.tanh() + 1.5).cumprod($dim)",
                "logcumsumexp": "h.logcumsumexp($dim)",
                "cummax": "h.cummax($dim).values",
                "diff": "F.pad(h, (0, 0, 1, 0)).diff(dim=1)",
                "reversed": "h.flip($dim).cumsum($dim).flip($dim) * 0.3",
            },
            "dim": _DIM,
        },
        sharp=True,
        weight=3,
    ),
    "turn": Kind(
        body="y = $form",
        options={
            "form": {
                "roll": "h.roll(1, $dim)",
                "roll_two": "h.roll((1, -1), (1, 2))",
                "flip": "h.flip($dim)",
                "flip_two": "h.flip(0, 1)",
                "half_turn": "torch.rot90(h, 2, (1, 2))",
                "shift": "torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1)",
            },
            "dim": _DIM,
        },
        weight=3,
    ),
    "update": Kind(
        init="self.${p} = nn.Parameter(torch.randn(1, W))",
        body="y = h * 1.5\n$form",
        options={
            "form": {
                "slice": "y[:, ::2] = h[:, ::2].sin()",
                "slice_add": "y[:, 0] += h.mean(1)",
                "sample": "y[0] = h[-1]",
                "entries": "y[..., 0] = h[..., -1].cos()",
                "put": "y = y.index_put((torch.arange(B), torch.zeros(B, dtype=torch.int64)),"
                " self.${p})",
                "accumulate": "y = y.index_put((ids % B, ids % T), h, accumulate=True)",
                "index_add": "y = y.index_add(1, torch.zeros(T, dtype=torch.int64), h)",
                "index_add_samples": "y = y.index_add(0, torch.zeros(B, dtype=torch.int64), h)",
                "index_copy": "y = y.index_copy(1, torch.zeros(1, dtype=torch.int64),"
                " self.${p}.expand(B, 1, W))",
                "index_fill": "y = y.index_fill($dim, torch.zeros(1, dtype=torch.int64), 0.3)",
                "masked_fill": "y = y.masked_fill(~keep.unsqueeze(-1), 0.2)",
                "masked_fill_rows": "y.masked_fill_(torch.arange(T)[:, None] > 0, 0.25)",
                "select_scatter": "y = y.select_scatter(h.mean(1), 1, 0)",
                "slice_scatter": "y = y.slice_scatter(h[:, :1].sin(), 1, 0, 1)",
                "where_ids": "y = torch.where((ids % 2 == 0).unsqueeze(-1), y, self.${p})",
            },
            "dim": same("1", "0", "2"),
        },
        weight=4,
    ),
    "shape": Kind(
        init="self.${p} = nn.Linear(W, W)",
        body="y = $form",
        options={
            "form": {
                "expand": "h + self.${p}(h[:, :1]).expand(B, T, W)",
                "expand_sample": "h + self.${p}(h[:1]).expand(B, T, W)",
                "pad": "F.pad(self.${p}(h), (0, 0, 1, 1))[:, 2:].cumsum(1)[:, :1] + h",
                "unfold": "F.pad(h, (0, 0, 1, 0)).unfold(1, 2, 1).mean(-1)",
                "windows": "F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).flatten(2)[..., :W]",
                "split": "torch.cat(self.${p}(h).split((1, W - 1), -1)[::-1], -1)",
                "chunk": "torch.cat([c.tanh() for c in h.chunk(2, 1)], 1)",
                "stack": "torch.stack((h, self.${p}(h)), 0).amax(0)",
                "repeat": "h.repeat(1, 2, 1)[:, :T] * self.${p}(h)",
                "tile": "h[:, :1].tile(1, T, 1) + h",
                "as_rows": "self.${p}(h.reshape(1, B * T, W)).view(B, T, W)",
                "transposed": "self.${p}(h.transpose(0, 1).contiguous()).transpose(0, 1)",
                "tokens_first": "self.${p}(h.movedim(1, 0).reshape(T, B * W).view(T, B, W))"
                ".movedim(0, 1)",
                "swapped": "h.reshape(T, B, W).tanh().reshape(B, T, W)",
                "mixed_rows": "self.${p}(h.reshape(B, T, W).transpose(0, 1).reshape(B, T, W))",
                "strided": "torch.cat((h[:, ::2], h[:, 1::2]), 1)",
                "meshed": "(h.unsqueeze(1) - h.unsqueeze(2)).tanh().sum(1) * 0.2",
            }
        },
        allowed=_wide,
        weight=4,
    ),
    "one_hot": Kind(
        init="self.${p} = nn.Parameter(torch.randn(V, W))",
        body="y = $form",
        options={
            "form": {
                "ids": "F.one_hot(ids, V).to(h.dtype) @ self.${p}",
                "embedding": "F.embedding(ids, self.${p}) * h",
                "argmax": "F.one_hot(h.argmax(-1) % V, V).to(h.dtype) @ self.${p}",
                "compared": "(ids.unsqueeze(-1) == torch.arange(V)).to(h.dtype) @ self.${p} + h",
                "positions": "h + F.embedding(torch.arange(T) % V, self.${p})",
                "bag": "h + F.one_hot(ids, V).sum(1, keepdim=True).to(h.dtype) @ self.${p}",
            }
        },
        sharp=True,
        weight=2,
    ),
    "einsum": Kind(
        init="self.${p} = nn.Parameter(torch.randn(T, T) * 0.3)",
        body="y = $form",
        options={
            "form": {
                "tokens": 'torch.einsum("ts,bsw->btw", self.${p}, h)',
                "matmul": "self.${p} @ h",
                "by_batch": "torch.bmm(self.${p}.expand(B, T, T), h)",
                "turned": "F.linear(h.transpose(1, 2), self.${p}).transpose(1, 2)",
                "gram": "torch.bmm(h @ h.transpose(1, 2) * 0.2, h)",
                "entries": "h @ (h.transpose(1, 2) @ h) * 0.2",
                "trace": 'h * torch.einsum("btw,btw->b", h, h)[:, None, None].tanh()',
                "samples": 'torch.einsum("btw,atw->bat", h, h).softmax(1).sum(1).unsqueeze(-1) * h',
                "triangle": "torch.tril(self.${p}) @ h",
            }
        },
        weight=3,
    ),
    "fft": Kind(
        body="y = $form",
        options={
            "form": {
                "filter": "torch.fft.irfft(torch.fft.rfft(h.float(), dim=1) * 0.5, n=T, dim=1)"
                ".to(h.dtype)",
                "learned": Fragment(
                    text="torch.fft.irfft(torch.fft.rfft(h.float(), dim=-1) * "
                    "torch.view_as_complex(self.${p}.float()), n=W, dim=-1).to(h.dtype)",
                    init="self.${p} = nn.Parameter(torch.randn(W // 2 + 1, 2))",
                ),
                "mix": "torch.fft.fft(torch.fft.fft(h.float(), dim=-1), dim=-2)"
                ".real.to(h.dtype) * 0.2",
                "abs": "torch.fft.fft(h.float() + 1, dim=1).abs().to(h.dtype) * 0.2",
            }
        },
        weight=2,
    ),
    "scan": Kind(
        init="self.${p} = nn.Linear(W, W)",
        body="""
state, states = torch.zeros_like(h[:, 0]), []
for t in range(T):
    state = torch.tanh(self.${p}(state) + h[:, t])
    states.append(state)
y = torch.stack(states, 1)
""",
        allowed=lambda sizes: sizes.tokens <= 5,
    ),
    "pool": Kind(
        body="y = $form.transpose(1, 2)",
        options={
            "form": {
                "avg": "F.avg_pool1d(h.transpose(1, 2), 3, 1, 1)",
                "max": "F.max_pool1d(h.transpose(1, 2), 3, 1, 1)",
                "adaptive": "F.adaptive_avg_pool1d(h.transpose(1, 2), T)",
                "nearest": "F.interpolate(h.transpose(1, 2)[..., :1], size=T)",
            }
        },
        allowed=some_tokens,
        sharp=True,
    ),
    "samples": Kind(
        body="y = $form",
        options={
            "form": {
                "centred": "h - h.mean(0, keepdim=True)",
                "mean": "h + h.mean(0)",
                "summed": "h + h.sum((0, 1)) * 0.1",
                "first": "h + h[0]",
                "last_token": "h + h[:, -1:]",
                "dot": "h * (h[:, 0] @ h[:, 0].t()).softmax(-1).sum(0)[:, None, None]",
                "prefix": "h + h[:, : T // 2 + 1].mean(1, keepdim=True)",
            }
        },
        weight=2,
    ),
}
