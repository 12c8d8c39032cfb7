"""The operators of the package flash-attn 2.8, which needs a GPU to build: signatures and aliases.

Each computes with plain operators what the package's kernel computes, so that a step with them can
be compared with eager on any device. What the package's kernels allocate is not here.
"""

import math
import types

import torch

_OPERATORS = torch.library.Library("flash_attn", "FRAGMENT")
_SETTINGS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes"
)
_GRADIENTS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPERATORS.define(
    f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_OPERATORS.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor softmax_lse, {_GRADIENTS}, {_SETTINGS}, "
    "bool deterministic, Tensor? rng_state=None) -> Tensor"
)
_OPERATORS.define(
    f"_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, {_LENGTHS}, float dropout_p, "
    "float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OPERATORS.define(
    "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor softmax_lse, {_GRADIENTS}, {_LENGTHS}, {_SETTINGS}, bool deterministic, "
    "Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)


def _scores(q, k, scale, causal):
    """(B, H, Tq, Tk) of (B, T, H, D), in float32; keys of fewer heads serve several."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    found = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if causal:
        ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        found = found.masked_fill(ahead, -math.inf)
    return found


def _forward(q, k, v, dropout_p, softmax_scale, causal, *settings):
    scores = _scores(q, k, softmax_scale, causal)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    return (
        out.contiguous(),
        scores.logsumexp(-1),
        none,
        torch.zeros(2, dtype=torch.int64, device=q.device),
    )


def _fake_forward(q, k, v, *settings):
    batch, rows, heads, _ = q.shape
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    return torch.empty_like(q), lse, none, torch.empty(2, dtype=torch.int64, device=q.device)


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, *settings
):
    groups = q.shape[2] // k.shape[2]
    weights = (_scores(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp()
    wide_k, wide_v = (side.repeat_interleave(groups, 2).float() for side in (k, v))
    grad = dout.float()
    delta = (grad * out.float()).sum(-1).transpose(1, 2)
    inner = weights * (torch.einsum("bqhd,bkhd->bhqk", grad, wide_v) - delta[..., None])
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", inner, wide_k) * softmax_scale)
    for target, found in (
        (dk, torch.einsum("bhqk,bqhd->bkhd", inner, q.float()) * softmax_scale),
        (dv, torch.einsum("bhqk,bqhd->bkhd", weights, grad)),
    ):
        target.copy_(found.unflatten(2, (-1, groups)).sum(3))
    return delta.contiguous()


def _fake_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *settings):
    return torch.empty_like(softmax_lse)


def _pieces(cu_seqlens_q, cu_seqlens_k):
    """The slices of each sequence among the rows of queries, and of keys."""
    ends = [ends.tolist() for ends in (cu_seqlens_q, cu_seqlens_k)]
    rows, columns = (map(slice, found[:-1], found[1:]) for found in ends)
    return list(zip(rows, columns, strict=True))


def _varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *settings):
    out, lse, none, state = _fake_varlen_forward(q, k, v)
    for rows, columns in _pieces(cu_seqlens_q, cu_seqlens_k):
        whole = (q[None, rows], k[None, columns], v[None, columns])
        out[rows], lse[:, rows] = (found[0] for found in _forward(*whole, *settings[:3])[:2])
    return out, lse, none, state.zero_()


def _fake_varlen_forward(q, k, v, *settings):
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    return torch.empty_like(q), lse, none, torch.empty(2, dtype=torch.int64, device=q.device)


def _varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *settings):
    delta = torch.empty_like(lse)
    for rows, columns in _pieces(cu_seqlens_q, cu_seqlens_k):
        given = (dout[None, rows], q[None, rows], k[None, columns], v[None, columns])
        given += (out[None, rows], lse[None, :, rows])
        made = (dq[None, rows], dk[None, columns], dv[None, columns])
        delta[:, rows] = _backward(*given, *made, *settings[2:5])[0]
    return delta


for _name, _run, _fake in (
    ("_flash_attn_forward", _forward, _fake_forward),
    ("_flash_attn_backward", _backward, _fake_backward),
    ("_flash_attn_varlen_forward", _varlen_forward, _fake_varlen_forward),
    ("_flash_attn_varlen_backward", _varlen_backward, _fake_backward),
):
    _OPERATORS.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_attn::{_name}", _fake, lib=_OPERATORS)


class FlashAttnFunc(torch.autograd.Function):
    """As ``flash_attn.flash_attn_interface.FlashAttnFunc``: (B, T, H, D) each."""

    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal):
        out, lse, _, rng_state = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout_p, softmax_scale, causal, -1, -1, 0.0, None, False
        )
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.settings = dropout_p, softmax_scale, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_backward(
            *(dout, q, k, v, out, lse, dq, dk, dv, *ctx.settings),
            *(-1, -1, 0.0, None, False, rng_state),
        )
        return dq, dk, dv, None, None, None


def flash_attn_func(q, k, v, dropout_p=0.0, causal=False):
    """As the package's function of that name."""
    return FlashAttnFunc.apply(q, k, v, dropout_p, q.shape[-1] ** -0.5, causal)


class FlashAttnVarlenFunc(torch.autograd.Function):
    """As ``flash_attn.flash_attn_interface.FlashAttnVarlenFunc``: (T, H, D) each."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal):
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        out, lse, _, rng_state = torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, *lengths, dropout_p, softmax_scale, causal
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, rng_state)
        ctx.settings = max_seqlen, (dropout_p, softmax_scale, causal)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, cu_seqlens, rng_state = ctx.saved_tensors
        longest, settings = ctx.settings
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_varlen_backward(
            *(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens, cu_seqlens, longest, longest),
            *(*settings, -1, -1, 0.0, None, False, rng_state),
        )
        return dq, dk, dv, None, None, None, None, None


def flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, causal=False):
    """As the package's function of that name, for sequences of keys as long as those of queries."""
    scale = q.shape[-1] ** -0.5
    return FlashAttnVarlenFunc.apply(q, k, v, cu_seqlens, max_seqlen, dropout_p, scale, causal)


class Kernels(types.ModuleType):
    """The package's module, and the kernels in it; counts outputs that were given to them."""

    def __init__(self):
        super().__init__("flash_attn.flash_attn_interface")
        self.flash_attn_gpu = self
        self.num_given = 0

    def fwd(self, q, k, v, out, slopes, dropout, scale, causal, *settings):
        *windows, softcap, returns_scores, generator = settings
        assert windows == [-1, -1]
        assert (slopes, softcap, returns_scores, generator) == (None, 0.0, False, None)
        return self._into(out, _forward(q, k, v, dropout, scale, causal))

    def varlen_fwd(self, q, k, v, out, ends_q, ends_k, *settings):
        used, padding, blocks, slopes, most_q, most_k, dropout, scale, zeroes = settings[:9]
        causal, left, right, softcap, returns_scores, generator = settings[9:]
        assert (used, padding, blocks, slopes, zeroes, generator) == (*4 * [None], False, None)
        assert (left, right, softcap, returns_scores) == (-1, -1, 0.0, False)
        found = _varlen_forward(q, k, v, ends_q, ends_k, most_q, most_k, dropout, scale, causal)
        return self._into(out, found)

    def _into(self, out, results):
        if out is None:
            return results
        self.num_given += 1
        assert out.stride(-1) == 1
        return (out.copy_(results[0]), *results[1:])
