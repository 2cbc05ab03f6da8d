"""Pure functions, one per hot operation: the plain-torch reference that every faster version must match.

**Row independence.** In exact mode (fp32) the result of one token must not depend on the number of other tokens in its
batch; otherwise engine and learner disagree. On CPUs two rules ensure this. Token counts are padded to `ROW_TILE`
before matrix products, because BLAS uses other kernels for thin matrices. Element-wise functions use operations that
round the same in vector and scalar form (so `silu` is built from `exp` and not from the fused kernel).
"""

ROW_TILE = 16
"""Token counts are rounded up to this before matrix products."""

KEY_TILE = 64
"""Key axes are rounded up to this before reductions over index heads."""


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
