"""Pieces that mix tokens by attention, in the ways that models write it."""

from tests.fuzz.grammar import Fragment, Kind, Sizes, same, some_tokens

_CAUSAL = "torch.ones(T, T, dtype=torch.bool).tril()"
_SCORES = "torch.zeros(T, T).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -1e4)"


def _buffer(value: str) -> Fragment:
    return Fragment(text="self.${p}_mask", init=f'self.register_buffer("${{p}}_mask", {value})')


def _parameter(shape: str) -> Fragment:
    return Fragment(
        text="self.${p}_mask", init=f"self.${{p}}_mask = nn.Parameter(torch.randn({shape}))"
    )


MASKS = {
    "none": "None",
    "bool_tt": _buffer(_CAUSAL),
    "float_tt": _buffer(_SCORES),
    "bool_11tt": _buffer(f"{_CAUSAL}[None, None]"),
    "float_11tt": _buffer(f"({_SCORES})[None, None]"),
    "bool_b11t": "keep[:, None, None, :]",
    "float_b11t": "torch.where(keep, 0.0, -1e4).to(q.dtype)[:, None, None, :]",
    "bool_b1tt": f"keep[:, None, None, :] & {_CAUSAL}",
    "float_bhtt": "(torch.where(keep, 0.0, -1e4)[:, None, None, :] + torch.zeros(B, H, T, T))"
    ".to(q.dtype)",
    "bool_bhtt": f"(keep[:, None, None, :] & {_CAUSAL}).expand(B, H, T, T)",
    "learned_tt": _parameter("T, T"),
    "learned_1htt": _parameter("1, H, T, T"),
    "learned_htt": _parameter("H, T, T"),
    "learned_t": _parameter("T"),
    "distances": "-(torch.arange(T)[:, None] - torch.arange(T)).abs().to(q.dtype) * 0.5",
}

_ROTARY = {
    "none": "",
    "halves": """
position = torch.arange(T, dtype=torch.float32)[:, None] * 0.3 ** torch.arange(D // 2)
cos, sin = (torch.cat((a, a), -1).to(q.dtype) for a in (position.cos(), position.sin()))
q = q * cos + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1) * sin
k = k * cos + torch.cat((-k[..., D // 2 :], k[..., : D // 2]), -1) * sin""",
    "complex": """
angle = torch.arange(T, dtype=torch.float32)[:, None] * 0.3 ** torch.arange(D // 2)
turn = torch.polar(torch.ones_like(angle), angle)
q, k = (
    torch.view_as_real(torch.view_as_complex(a.float().reshape(*a.shape[:-1], D // 2, 2)) * turn)
    .flatten(-2)
    .to(a.dtype)
    for a in (q, k)
)""",
}


def _even_head(sizes: Sizes) -> bool:
    return sizes.head % 2 == 0


def _grouped(sizes: Sizes) -> bool:
    return sizes.heads > 1


_HEADS = """
q = self.${p}_q(h).view(B, T, H, D).transpose(1, 2)
k = self.${p}_k(h).view(B, T, H, D).transpose(1, 2)
v = self.${p}_v(h).view(B, T, H, D).transpose(1, 2)
"""
_PROJECTIONS = """
self.${p}_q = nn.Linear(W, W, bias=$bias)
self.${p}_k = nn.Linear(W, W, bias=$bias)
self.${p}_v = nn.Linear(W, W, bias=$bias)
self.${p}_o = nn.Linear(W, W, bias=$bias)
"""
_BIAS = same("False", "True")
_SCALE = same("D**-0.5", "0.3")
_OUT = "y = self.${p}_o(a.transpose(1, 2).reshape(B, T, W))"

KINDS = {
    "sdpa": Kind(
        init=_PROJECTIONS,
        body=_HEADS + "a = F.scaled_dot_product_attention(q, k, v, attn_mask=$mask)\n" + _OUT,
        options={"mask": MASKS, "bias": _BIAS},
        weight=5,
    ),
    "sdpa_causal": Kind(
        init=_PROJECTIONS,
        body=_HEADS + "a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=$scale)\n"
        "y = self.${p}_o(a.transpose(1, 2).reshape(B, T, W))",
        options={"bias": _BIAS, "scale": _SCALE},
    ),
    "rotary": Kind(
        init=_PROJECTIONS,
        body=_HEADS
        + "$rotary\na = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        + _OUT,
        options={"rotary": _ROTARY, "bias": _BIAS},
        allowed=_even_head,
        weight=3,
    ),
    "sdpa_grouped": Kind(
        init="self.${p}_q = nn.Linear(W, W)\nself.${p}_kv = nn.Linear(W, 2 * D)",
        body="""
q = self.${p}_q(h).view(B, T, H, D).transpose(1, 2)
k, v = self.${p}_kv(h).view(B, T, 2, 1, D).unbind(2)
k, v = k.transpose(1, 2), v.transpose(1, 2)
$spread
y = a.transpose(1, 2).flatten(2)
""",
        options={
            "spread": {
                "repeat": "k, v = k.repeat_interleave(H, 1), v.repeat_interleave(H, 1)\n"
                "a = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                "expand": "k, v = k.expand(B, H, T, D), v.expand(B, H, T, D)\n"
                "a = F.scaled_dot_product_attention(q, k, v, attn_mask=$mask)",
                "enable_gqa": "a = F.scaled_dot_product_attention(q, k, v, attn_mask=$mask,"
                " enable_gqa=True)",
            },
            "mask": MASKS,
        },
        allowed=_grouped,
        weight=2,
    ),
    "sdpa_no_heads": Kind(
        init="self.${p} = nn.Linear(W, 3 * W)",
        body="q, k, v = self.${p}(h).chunk(3, -1)\n"
        "y = F.scaled_dot_product_attention(q, k, v, attn_mask=$mask)",
        options={
            "mask": {
                **{name: MASKS[name] for name in ("none", "bool_tt", "float_tt", "learned_tt")},
                "bool_1tt": _buffer(f"{_CAUSAL}[None]"),
                "bool_b1t": "keep[:, None, :]",
                "learned_btt": _parameter("B, T, T"),
                "distances": MASKS["distances"],
            }
        },
        weight=3,
    ),
    "manual": Kind(
        init=_PROJECTIONS,
        body=_HEADS + "scores = $product\n$masked\na = $softmax @ v\n" + _OUT,
        options={
            "product": {
                "matmul": "q @ k.transpose(-1, -2) * D**-0.5",
                "einsum": 'torch.einsum("bhtd,bhsd->bhts", q, k) * 0.4',
                "distances": "-torch.cdist(q.float(), k.float() + 0.5).to(h.dtype)",
            },
            "masked": {
                "none": "",
                "fill": f"scores = scores.masked_fill(~{_CAUSAL}, -1e4)",
                "where": "scores = torch.where(keep[:, None, None, :], scores, -1e4)",
                "add": "scores = scores + torch.where(keep, 0.0, -1e4).to(h.dtype)[:, None, None]",
            },
            "softmax": {
                "softmax": "scores.softmax(-1)",
                "float": "scores.float().softmax(-1).to(h.dtype)",
                "sink": "F.pad(scores, (0, 1)).softmax(-1)[..., :-1]",
                "sigmoid": "scores.sigmoid()",
                "by_hand": "((e := (scores - scores.amax(-1, True)).exp()) / e.sum(-1, True))",
                "batch": "scores.softmax(0)",
            },
            "bias": _BIAS,
        },
        weight=3,
    ),
    "multihead": Kind(
        init="self.${p} = nn.MultiheadAttention(W, H, batch_first=$first)",
        body="y, _ = self.${p}(h, h, h, need_weights=$weights, attn_mask=$mask)",
        options={
            "first": same("True", "False"),
            "weights": same("False", "True"),
            "mask": {
                "none": "None",
                "causal": "(~" + _CAUSAL + ") if $first else None",
            },
        },
    ),
    "linear_attention": Kind(
        init="self.${p} = nn.Linear(W, 3 * W)",
        body="""
q, k, v = self.${p}(h).view(B, T, 3, H, D).unbind(2)
k = F.elu(k) + 1
state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
y = torch.einsum("bthd,bthde->bthe", q, state / (1 + k.cumsum(1).unsqueeze(-1))).flatten(2)
""",
        allowed=some_tokens,
    ),
}
