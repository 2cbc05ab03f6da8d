"""Pure functions, one per hot operation: the plain-torch reference that every faster version must match.

**Row independence.** In exact mode (fp32) the result of one token must not depend on how many other tokens share its
batch, or engine and learner disagree. Two rules make it so on CPUs: token counts are padded to `ROW_TILE` before they
meet a matrix product (BLAS picks other kernels for thin matrices), and element-wise functions are built from operations
whose vector and scalar forms round alike (hence `silu` through `exp` instead of the fused kernel).
"""

ROW_TILE = 16
"""Token counts are rounded up to this before matrix products."""

KEY_TILE = 64
"""Key axes are rounded up to this before reductions over index heads."""


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
