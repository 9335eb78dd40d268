"""Pipeline schedules by name (without torch): how many stages a rank has under each."""

STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}

# The loop turns back at the last rank: rank 0 has the first and the last stage.
TURNING = {"ZBVZeroBubble", "DualPipeV"}

# Weight gradients are computed apart from those of the inputs.
SPLIT_BACKWARD = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
