"""Pieces with buffers that the forward reads and writes, in every order."""

from tests.fuzz.grammar import Kind, same

KINDS = {
    "buffer": Kind(
        init="""
self.${p} = nn.Linear(W, W)
self.register_buffer("${p}_b", torch.linspace(0.1, 1.0, W))
""",
        body="$read\n$write",
        options={
            "read": {
                "bias": "y = F.linear(h, self.${p}.weight, self.${p}_b)",
                "activation": "y = F.gelu(h + self.${p}_b)",
                "normalised": "y = F.layer_norm(h + self.${p}_b, (W,), eps=0.1)",
                "softmax": "y = (self.${p}(h) + self.${p}_b).softmax(-1)",
                "squared": "y = h * (self.${p}_b * self.${p}_b).sin()",
                "unread": "y = self.${p}(h)",
            },
            "write": {
                "none": "",
                "mul": "self.${p}_b.mul_(1.5)",
                "add_mean": "self.${p}_b.add_(h.detach().mean((0, 1)))",
                "lerp": "self.${p}_b.lerp_(h.detach().amax((0, 1)), 0.3)",
                "copy": "self.${p}_b.copy_(y.detach()[0, 0])",
                "slice": "self.${p}_b[: W // 2 + 1] += 0.5",
                "replaced": "self.${p}_b = self.${p}_b * 1.25",
                "then_read": "self.${p}_b.mul_(0.5)\ny = y * self.${p}_b",
            },
        },
        stateful=True,
        weight=4,
    ),
    "buffer_saved": Kind(
        init="""
self.${p} = nn.Linear(W, W)
self.register_buffer("${p}_b", torch.linspace(0.1, 1.0, W))
""",
        body="$read\n$write",
        options={
            "read": {
                "product": "y = torch.tanh(self.${p}(h) * self.${p}_b)",
                "twice": "y = torch.tanh(self.${p}(h * self.${p}_b)) * self.${p}_b",
                "matmul": "y = h * (self.${p}(h) @ self.${p}_b).unsqueeze(-1)",
            },
            "write": {
                "none": "",
                "replaced": "self.${p}_b = self.${p}_b * 1.25",
                "from_result": "self.${p}_b = y.detach()[0, 0].tanh()",
            },
        },
        stateful=True,
    ),
    "cache": Kind(
        init="""
self.register_buffer("${p}_cache", torch.zeros(B, T, W))
self.register_buffer("${p}_count", torch.zeros((), dtype=torch.int64))
""",
        body="""
y = h + torch.tanh(self.${p}_cache)
self.${p}_cache$at
self.${p}_count.add_(1)
y = y * $count
""",
        options={
            "at": {
                "copy": ".copy_(h.detach())",
                "slice": "[:, :1] = h.detach()[:, -1:]",
                "sample": "[0].add_(h.detach()[0])",
            },
            "count": same("1.0", "(1.0 / (1 + self.${p}_count))"),
        },
        stateful=True,
        weight=2,
    ),
}
