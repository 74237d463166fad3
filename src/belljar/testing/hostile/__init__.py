"""The hostile suite: programs that try to get out, and a judge for every backend.

    from belljar.testing import hostile

    card = hostile.examine("subprocess")
    assert not card.failed, card.text()

`cases.yaml` holds the programs and what must be seen of each; its header is the law that `judge`
reads. `world` is the host that a guest would like to touch, `checks` look at it from outside,
`control` runs the same programs without a sandbox to prove that the checks can fail, `ablation`
switches protections off one by one to ask what each is good for.
"""

from .cases import Case, CasesInvalid, Suite, load
from .examine import examine
from .judge import Verdict
from .runner import Outcome, Runner
from .scorecard import Card
from .subject import EngineSubject, Job, Seen
from .world import World

__all__ = [
    "Card",
    "Case",
    "CasesInvalid",
    "EngineSubject",
    "Job",
    "Outcome",
    "Runner",
    "Seen",
    "Suite",
    "Verdict",
    "World",
    "examine",
    "load",
]
