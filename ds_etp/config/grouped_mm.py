"""The alignment rule of torch's grouped matrix multiply, which `experts_implementation="grouped_mm"` runs."""

from __future__ import annotations

# What torch's grouped matrix multiply wants rows of an expert's weights to be a multiple of, in bytes.
GROUPED_MM_ALIGNMENT = 16


def keeps_alignment(intermediate_size: int, etp: int, itemsize: int) -> bool:
    """Whether grouped_mm takes the shards of experts, if it takes the whole experts.

    torch raises "strides should be multiple of 16 bytes" (2.13, on the CPU and on CUDA), for weights and for the
    activations before the down projection, whose rows are as long.

    Args:
        intermediate_size: of the whole experts.
        etp: the ranks it is split over.
        itemsize: bytes of one weight while training.
    """

    def is_aligned(columns: int) -> bool:
        return columns * itemsize % GROUPED_MM_ALIGNMENT == 0

    return is_aligned(intermediate_size // etp) or not is_aligned(intermediate_size)
