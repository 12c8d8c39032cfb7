"""Pieces that treat every token alike: MLPs, normalisations, parameters with equal gradients."""

from tests.fuzz.grammar import Fragment, Kind, Sizes, same

_ACTIVATIONS = {
    "gelu": "F.gelu",
    "relu": "F.relu",
    "silu": "F.silu",
    "tanh": "torch.tanh",
    "relu_": "torch.relu_",
    "gelu_tanh": '(lambda t: F.gelu(t, approximate="tanh"))',
    "softplus": "F.softplus",
    "square": "(lambda t: F.relu(t) ** 2)",
    "hardswish": "F.hardswish",
    "mish": "F.mish",
}
_FACTOR = same("1", "2", "3", "4")


def _many(sizes: Sizes) -> bool:
    return sizes.batch * sizes.tokens > 1


def _vary(sizes: Sizes) -> bool:
    """With three entries or more a normalisation over the width is not degenerate."""
    return sizes.width > 2


KINDS = {
    "linear": Kind(
        init="self.${p} = nn.Linear(W, W, bias=$bias)",
        body="y = self.${p}(h)",
        options={"bias": same("True", "False")},
    ),
    "mlp": Kind(
        init="""
self.${p}_up = nn.Linear(W, $factor * W, bias=$bias)
self.${p}_down = nn.Linear($factor * W, W, bias=$bias)
""",
        body="y = self.${p}_down($drop($act(self.${p}_up(h))))",
        options={
            "act": _ACTIVATIONS,
            "factor": _FACTOR,
            "bias": same("True", "False"),
            "drop": {"no": "", "dropout0": "nn.Dropout(0.0)"},
        },
        weight=4,
    ),
    "gated": Kind(
        init="""
self.${p}_gate = nn.Linear(W, $factor * W, bias=False)
self.${p}_up = nn.Linear(W, $factor * W, bias=False)
self.${p}_down = nn.Linear($factor * W, W, bias=False)
""",
        body="y = self.${p}_down($act(self.${p}_gate(h)) * self.${p}_up(h))",
        options={"act": _ACTIVATIONS, "factor": _FACTOR},
        weight=3,
    ),
    "fused_gate": Kind(
        init="self.${p}_up = nn.Linear(W, 2 * W)\nself.${p}_down = nn.Linear(W, W)",
        body="y = self.${p}_down($glu)",
        options={
            "glu": {
                "chunk": "(lambda a, b: F.silu(a) * b)(*self.${p}_up(h).chunk(2, -1))",
                "glu": "F.glu(self.${p}_up(h))",
                "strided": "(lambda u: F.silu(u[..., ::2]) * u[..., 1::2])(self.${p}_up(h))",
            }
        },
    ),
    "experts": Kind(
        init="""
self.${p}_route = nn.Linear(W, 3)
self.${p}_up = nn.Parameter(torch.randn(3, W, W) * 0.3)
self.${p}_down = nn.Parameter(torch.randn(3, W, W) * 0.3)
""",
        body="""
gate, at = self.${p}_route(h).softmax(-1).topk($k, -1)
dense = torch.zeros(B, T, 3, dtype=h.dtype).scatter(-1, at, gate)
inner = F.silu(torch.einsum("btw,ewv->btev", h, self.${p}_up))
y = torch.einsum("btev,evw,bte->btw", inner, self.${p}_down, dense)
""",
        options={"k": same("1", "2", "3")},
        sharp=True,
        weight=2,
    ),
    "norm": Kind(
        body="y = $norm",
        options={
            "norm": {
                "layer": Fragment(text="self.${p}(h)", init="self.${p} = nn.LayerNorm(W)"),
                "rms": Fragment(text="self.${p}(h)", init="self.${p} = nn.RMSNorm(W)"),
                "rms_by_hand": Fragment(
                    text="(self.${p} * (h.float() * torch.rsqrt(h.float().pow(2)"
                    ".mean(-1, keepdim=True) + 1e-5))).to(h.dtype)",
                    init="self.${p} = nn.Parameter(torch.ones(W))",
                ),
                "group": Fragment(
                    text="self.${p}(h.transpose(1, 2)).transpose(1, 2)",
                    init="self.${p} = nn.GroupNorm(H, W)",
                ),
                "tokens": "F.layer_norm(h, (T, W), eps=1e-2)",
                "unit": "F.normalize(h, dim=-1, eps=1e-2)",
            },
        },
        allowed=_vary,
        weight=2,
    ),
    "batch_norm": Kind(
        init="self.${p} = nn.BatchNorm1d(W, eps=0.1)",
        body="y = $form",
        options={
            "form": {
                "rows": "self.${p}(h.reshape(B * T, W)).view(B, T, W)",
                "channels": "self.${p}(h.transpose(1, 2)).transpose(1, 2)",
            }
        },
        allowed=_many,
        stateful=True,
        weight=2,
    ),
    "stats": Kind(
        body="$stats",
        options={
            "stats": {
                "var_mean": "var, mean = torch.var_mean(h, $dim, keepdim=True, correction=0)\n"
                "y = (h - mean) * torch.rsqrt(var + 0.5)",
                "std": "y = h / (1 + torch.std(h, $dim, keepdim=True, correction=0) ** 2)",
                "logsumexp": "y = h - h.logsumexp($dim, keepdim=True)",
                "norm": "y = h / (1 + torch.linalg.vector_norm(h + 0.1, dim=$dim, keepdim=True))",
                "mean": "y = h - h.mean($dim, keepdim=True)",
                "squeezed": "y = h * torch.var_mean(h, $dim, correction=0)[0].unsqueeze($dim)",
                "softmax": "y = h.softmax($dim)",
                "log_softmax": "y = 0.3 * h.log_softmax($dim)",
            },
            "dim": same("-1", "1", "0"),
        },
        weight=2,
    ),
    "equal_gradients": Kind(
        body="$form",
        options={
            "form": {
                "biases": Fragment(
                    text="y = torch.tanh((h.reshape(-1, W) @ self.${p}.T + self.${p}_a)"
                    " + self.${p}_b).view(B, T, W)",
                    init="self.${p} = nn.Parameter(torch.randn(W, W) * 0.3)\n"
                    "self.${p}_a = nn.Parameter(torch.randn(W))\n"
                    "self.${p}_b = nn.Parameter(torch.randn(1, W))",
                ),
                "products": Fragment(
                    text="y = h + h @ self.${p}_a + self.${p}_b(h)",
                    init="self.${p}_a = nn.Parameter(torch.randn(W, W) * 0.3)\n"
                    "self.${p}_b = nn.Linear(W, W)",
                ),
                "sums": Fragment(
                    text="y = h + self.${p}_a + self.${p}_b + (h * self.${p}_c + h * self.${p}_d)",
                    init="\n".join(
                        f"self.${{p}}_{name} = nn.Parameter(torch.randn({shape}))"
                        for name, shape in (
                            ("a", "W"),
                            ("b", "1, 1, W"),
                            ("c", "W"),
                            ("d", "T, W"),
                        )
                    ),
                ),
            }
        },
        weight=2,
    ),
    "shared_weight": Kind(
        init="self.${p} = nn.Parameter(torch.randn(W, W) * 0.3)",
        body="y = F.linear(torch.tanh(F.linear(h, self.${p})), self.${p}$turned)",
        options={"turned": {"same": "", "transposed": ".t()"}},
    ),
    "bilinear": Kind(
        init="self.${p} = nn.Parameter(torch.randn(W, W, W) * 0.1)",
        body='y = torch.einsum("bti,oij,btj->bto", h, self.${p}, h.tanh())',
        allowed=lambda sizes: sizes.width <= 16,
    ),
    "pointwise": Kind(
        body="y = $form",
        options={
            "form": {
                "where": "torch.where(h > 0.1, h, h * h)",
                "clamp": "h.clamp(-0.7, 0.9)",
                "minmax": "torch.maximum(h, h.flip(-1) * 0.5) - torch.minimum(h, -h)",
                "outer": "(h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1) * 0.2",
                "powers": "(h.abs() + 0.3) ** 1.5",
                "erf": "torch.erf(h) + torch.sin(h) * torch.exp(-h * h)",
                "added_in_place": "(h * 2).add_(h.sin()).mul_(0.5)",
                "detached": "h * h.detach().sigmoid()",
                "no_grad": "h * no_grad_mean(h)",
                "doubled": "(h.double() * 1.5).to(h.dtype)",
                "dropout0": "F.dropout(h, 0.0, training=True) * 1.5",
            }
        },
        weight=2,
    ),
}
