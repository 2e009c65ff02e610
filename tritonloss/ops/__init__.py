"""The streamed primitives: each is one custom op with an autograd formula."""

from tritonloss.ops.soft_rank import SoftRanks, soft_rank

__all__ = ["SoftRanks", "soft_rank"]
