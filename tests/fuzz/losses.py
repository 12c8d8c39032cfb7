"""What ends a model: the head, the loss inside or outside of it, and what it returns besides.

The loss is a function of ``x`` (``[B, T, W]``), ``logits`` (``[B, T, V]``), ``labels`` (``[B, T]``,
some -100) and ``soft`` (``[B, T, V]``, rows sum to one).
"""

from tests.fuzz.grammar import Fragment, Kind, same

HEADS = Kind(
    init="$head",
    body="logits = $form",
    options={
        "head": {"linear": "self.head = nn.Linear(W, V, bias=False)", "tied": "pass"},
        "form": {
            "plain": "$product",
            "float": "($product).float()",
            "capped": "3 * ($product / 3).tanh()",
        },
        "product": {"linear": "F.linear(x, $weight)", "matmul": "x @ ($weight).t()"},
        "weight": same("self.head.weight", "self.embed.weight"),
    },
)

_FLAT = "logits.reshape(-1, V), labels.reshape(-1)"

LOSSES = {
    "cross_entropy": Kind(
        body="loss = F.cross_entropy($layout$smoothing$weights$reduced)$scalar",
        options={
            "layout": {
                "flat": _FLAT,
                "channels": "logits.transpose(1, 2), labels",
                "shifted": "logits[:, : max(1, T - 1)].reshape(-1, V),"
                " labels[:, -max(1, T - 1) :].reshape(-1)",
                "sample": "logits[0], labels[0]",
            },
            "smoothing": {"none": "", "tenth": ", label_smoothing=0.1"},
            "weights": {
                "none": "",
                "weights": ", weight=torch.linspace(0.5, 2.0, V).to(logits.dtype)",
            },
            "reduced": {"mean": "", "sum": ', reduction="sum"', "none": ', reduction="none"'},
            "scalar": {"plain": ".sum()", "mean": ".mean()"},
        },
        weight=5,
    ),
    "z_loss": Kind(
        body=f"loss = F.cross_entropy({_FLAT}$smoothing)"
        " + 0.1 * (logits.logsumexp(-1) ** 2).mean()",
        options={"smoothing": {"none": "", "tenth": ", label_smoothing=0.1"}},
        weight=2,
    ),
    "soft_targets": Kind(
        body="loss = F.cross_entropy(logits.reshape(-1, V), soft_targets.reshape(-1, V)$smoothing)",
        options={"smoothing": {"none": "", "tenth": ", label_smoothing=0.1"}},
        weight=2,
    ),
    "nll": Kind(
        body="loss = F.nll_loss(logits.log_softmax(-1).$layout)",
        options={
            "layout": {
                "flat": "reshape(-1, V), labels.reshape(-1)",
                "channels": "transpose(1, 2), labels",
            }
        },
    ),
    "kl": Kind(
        body="loss = F.kl_div(logits.log_softmax(-1), soft_targets, reduction=$reduction)",
        options={"reduction": same('"batchmean"', '"sum"')},
    ),
    "mse": Kind(body="loss = F.mse_loss(logits, soft_targets)"),
    "huber": Kind(
        body="loss = F.huber_loss(logits, soft_targets) + F.l1_loss(logits, soft_targets) * 0.1"
    ),
    "binary": Kind(body="loss = F.binary_cross_entropy_with_logits(logits, soft_targets)"),
    "sum": Kind(body="loss = logits.sum()"),
    "squares": Kind(body="loss = (logits**2).mean() + x.sum() * 0.1"),
    "by_hand": Kind(
        body="""
chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
known = (labels >= 0).to(logits.dtype)
loss = ((logits.logsumexp(-1) - chosen) * known).sum() / known.sum().clamp(min=1)
""",
        weight=2,
    ),
    "parts": Kind(
        body='loss = sum(F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum")'
        " for a, b in zip(logits.chunk(2, 1), labels.chunk(2, 1)))",
    ),
    "preferred": Kind(
        body="loss = -F.logsigmoid(logits[: B // 2 + 1].mean() - logits[B // 2 :].mean() * 0.5)",
    ),
}

RETURNS = {
    "nothing": "",
    "logits": "logits",
    "hidden": "x",
    "logits_and_hidden": "logits, x",
    "all_hidden": "*hidden",
    "all": "logits, *hidden, x",
    "equal": "F.relu(x * 2), F.relu(x * 2)",
    "equal_logits": "logits * 2, logits * 2",
    "view": "logits[:, -1], logits",
    "transposed": "x.transpose(1, 2), x",
    "detached": "x.detach(), logits.argmax(-1)",
    "input": "vectors, x",
    "parameter": "self.embed.weight, x",
    "twice": "x, x",
    "statistics": "x.mean(), logits.amax(-1), logits.detach().softmax(-1)",
    "buffer_free": "torch.arange(T), x[0]",
}
"""What the forward returns behind the loss (or the logits, where the loss is made outside)."""

STEMS = {
    "embedding": Fragment(
        init="self.embed = nn.Embedding(V, W)\nself.place = nn.Parameter(torch.randn(T, W) * 0.3)",
        text="x = self.embed(ids) + self.place",
    ),
    "vectors": Fragment(
        init="self.embed = nn.Embedding(V, W)", text="x = vectors + self.embed(ids) * 0.5"
    ),
    "projected": Fragment(
        init="self.embed = nn.Embedding(V, W)\nself.enter = nn.Linear(W, W)",
        text="x = self.enter(vectors) + self.embed(ids)",
    ),
    "scaled": Fragment(
        init="self.embed = nn.Embedding(V, W)\nself.place = nn.Embedding(T, W)",
        text="x = self.embed(ids) * W**0.5 + self.place(torch.arange(T))",
    ),
}
