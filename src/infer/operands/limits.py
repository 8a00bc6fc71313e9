"""Upper limits of one step, for which recordings, estimates and options are made. Loads no torch."""

MAX_STEP_TOKENS = 512  # a cancel is seen between two steps
MAX_STEP_TEXTS = 128  # of an encoder
MAX_STEP_LOGITS = 64  # sequences and their drafts
STATE_TOKENS = 64  # from one state of a recurrent layer to the next that is kept
RECENT_PAGES = 3  # of a step, in which a recurrent layer keeps all; pages so far apart may share memory in a step
