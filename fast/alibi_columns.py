"""ALiBi without a mask, for kernels that know no bias: more columns of q and k hold it.

Softmax does not change when a constant is added to a row, so under causality -slope * (i - j) and
slope * j are the same bias. The second depends on the key alone: extra columns of q hold ones,
extra columns of k hold slope * j / scale.
"""

import torch
import torch.nn.functional as F


def with_alibi_columns(q, k, v, rule):
    """Widen D by 8, so that q' k'^T * scale = q k^T * scale + slope * j. v' has zeros there.

    rule: an `attention.ScoreRule`. bf16 keeps 8 bits of a number, too few for 999.5. So three
    columns hold it in three parts, 1000 - 0.5 + 0, whose sum is exact to about 24 bits; the kernel
    adds their products in fp32. Five more columns of zeros keep D a multiple of 8.
    """
    position = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
    rest = rule.slopes[:, None] * position / rule.scale  # (H, Tk) fp32
    parts = []
    for _ in range(2):
        part = rest.to(torch.bfloat16).to(k.dtype)
        parts.append(part)
        rest = rest - part.float()
    parts.append(rest.to(k.dtype))
    columns = F.pad(torch.stack(parts, dim=-1), (0, 5))  # (H, Tk, 8)
    k = torch.cat([k, columns.expand(k.shape[0], -1, -1, -1)], dim=-1)
    return F.pad(q, (0, 8), value=1.0), k, F.pad(v, (0, 8))
