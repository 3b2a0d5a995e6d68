"""Whether a dataset is sound, and which task its recorded rewards are of.

A check fails if learning from the data as they are would go wrong:

    schema            a file is damaged, a field missing, of another type or shape, or not finite
    digests           an episode of a store was changed since it was packed
    row 0             the row where an episode starts has an action or a reward
    action range      actions outside [-1, 1]
    discounts         other than 1
    observations      not those of the states, but for entries that sensors felt
    one-step physics  states that MuJoCo does not reach from those before
    action rows       states follow from the action in the row before or after
    reward rows       rewards are those of the row before or after
    recorded reward   of a task in some of a collector's episodes, of none in others

It only warns of what may be meant: recorded rewards of no task, as intrinsic ones are, or of a
task whose control costs nothing; the states and actions of another episode (`duplicates`), whatever
its rewards; missing or double `numbers`; files `skipped` when the store was packed.
"""

from exorl.verify.report import Check, Collector, Match, Report, Status
from exorl.verify.source import VerifyError
from exorl.verify.verifier import verify

__all__ = ["Check", "Collector", "Match", "Report", "Status", "VerifyError", "verify"]
