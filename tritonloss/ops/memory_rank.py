"""`memory_rank`: how many entries of a row of remembered scores stand above each score, softly counted."""

import torch
from torch import Tensor

# The differences that are held at a time.
CUBE_BYTES = 4 << 20


def memory_rank(scores: Tensor, memory: Tensor, *, temperature: float = 0.001) -> tuple[Tensor, Tensor]:
    """sum over the entries v of memory[q] of l(scores[q, i] - v): a lower bound of the number of entries above.

    l(x) = (1 - e^(x / temperature)) / (1 + e^(x / temperature)) for x < 0, and 0 elsewhere: SOPRC's one-side sigmoid
    (arXiv 2209.13262, Eq. 7), tanh(-x / (2 temperature)). Its derivative at 0, up to rounding, is taken as 0: what is
    remembered of a query with one positive is the score of that positive.

    Args:
        scores: [Q, P] float32 or float64.
        memory: [Q, V], same dtype.
        temperature: width of l, > 0. No value of it overflows.

    Returns:
        The sums [Q, P] and their derivatives by the scores [Q, P], constant.

    Time O(Q P V), plain torch on every device: few elements beside those of `soft_rank`. Memory O(4 MiB + Q (P + V)).
    """
    sums, slopes = torch.empty_like(scores), torch.empty_like(scores)
    n_queries, n_entries = memory.shape
    # A few roundings of a product of two rows.
    nothing = 32 * torch.finfo(scores.dtype).eps / temperature
    # Of an entry four numbers are held at a time.
    step = max(1, CUBE_BYTES // max(1, 4 * n_queries * n_entries * memory.element_size()))
    for begin in range(0, scores.shape[1], step):
        part = slice(begin, begin + step)
        above = (memory[:, None] - scores[:, part, None]).clamp_(min=0).div_(temperature)
        # sech^2 from one exponential of a negative number: exact far out, where 1 - tanh^2 is rounding error.
        decay = torch.exp(-above).masked_fill_(above <= nothing, 0)
        slopes[:, part] = decay.div_((1 + decay).square_()).sum(2).mul_(-2 / temperature)
        sums[:, part] = above.div_(2).tanh_().sum(2)
    return sums, slopes
