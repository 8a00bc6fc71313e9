"""Upper limits of one step, for which recordings, estimates and options are made. Loads no torch."""

from typing import NamedTuple


class StepLimits(NamedTuple):
    """Largest numbers of tokens, and of lines of logits, in one step. Lines are for sequences and their drafts."""

    tokens: int  # a cancel is seen between two steps
    logits: int


HOST_STEP = StepLimits(512, 64)  # of devices that a few tokens keep busy
GPU_STEP = StepLimits(8192, 512)
MAX_STEP_TEXTS = 128  # of an encoder
STATE_TOKENS = 64  # from one state of a recurrent layer to the next that is kept
RECENT_PAGES = 3  # of a step, in which a recurrent layer keeps all; pages so far apart may share memory in a step
