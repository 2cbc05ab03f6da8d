"""Selection by index scores from 8-bit queries and keys: FP8 as in DeepSeek-V3.2's indexer, or int8 of the same form.

Every row of queries (a head of a token) and every key has a scale in fp32 of its own. Scales of queries go into the
weights of the heads, those of keys multiply the sum over heads, so a matrix product sees 8-bit numbers only.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from glm5.ops.operators import TORCH_FORMS, operator
from glm5.ops.pages import Pages, plain_view

Scores = Literal["fp8", "int8"]


def quantise_rows(x: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Rows of x [..., d] in 8 bits, and their scales [...] in fp32: a row is about its 8-bit numbers times its scale.
    The scale of a row with NaN or infinity is no finite number either, so its scores are NaN."""
    # MI300 has another FP8 than NVIDIA: a largest value of 240, not 448.
    fp8 = torch.float8_e4m3fnuz if x.is_cuda and torch.version.hip else torch.float8_e4m3fn
    dtype, most = (torch.int8, 127.0) if scores == "int8" else (fp8, torch.finfo(fp8).max)
    x = x.to(torch.float32)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    numbers = (x / scale).nan_to_num(0.0, 0.0, 0.0)
    return (numbers.round() if scores == "int8" else numbers).to(dtype), scale.squeeze(-1)


@operator(
    "select_8bit(Tensor q, Tensor k, Tensor k_scale, Tensor? rows, Tensor? table, int per_row, int shift, int size, "
    "Tensor w, Tensor start, Tensor end, int topk) -> Tensor",
    lambda q, *args: q.new_empty(*q.shape[:2], args[-1], dtype=torch.long),
    triton="index_select.select_8bit",
)
def _select(q: Tensor, k: Tensor, k_scale: Tensor, *rest: Any) -> Tensor:
    """The operator `select` on dequantised keys; w holds the scales of q."""
    found: Tensor = TORCH_FORMS["select"](q.float(), k.float() * k_scale.unsqueeze(-1), *rest)
    return found


def select_keys_8bit(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, pages: Pages | None, scores: Scores
) -> Tensor:
    """`glm5.ops.indexer.select_keys` with queries and keys rounded to `scores`. It quantises all keys that it is given,
    with `pages` the whole pool."""
    (q, scale), (k, k_scale) = quantise_rows(q, scores), quantise_rows(k, scores)
    view = plain_view(k.shape[1]) if pages is None else pages.kernel_view()
    w, start, end = (w.float() * scale).contiguous(), start.contiguous(), end.contiguous()
    return _select(q.contiguous(), k.contiguous(), k_scale.contiguous(), *view, w, start, end, topk)
