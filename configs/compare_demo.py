"""Ten ways to learn, compared on the demo's two policies: three seeds each, within an hour on two CPU cores.

GRPO alone with 8 and 16 rollouts a problem, the ways to learn from a live peer, and the controls for the claim that it
is learning from each other that helps: the peer frozen at its start; the log of a peer that learns, but never heard
this learner; and plain imitation of the very rows that SGT trained on.
"""

import runpy
from pathlib import Path

from mutualrl.arms import comparison

HEARD_BY = {"llama": "qwen", "qwen": "llama"}


def logs(arm, used=False):
    """Settings with which each policy hears what the other published in the same seed's run of `arm`, in the log that
    is named after it; `used`: only the rows that it trained on itself in that run."""
    return {
        "exchange.logs": {
            f"{name}_log": {
                "folder": f"{{{arm}}}/exchange.log",
                "policy": name,
                "used_by": HEARD_BY[name] if used else "",
            }
            for name in HEARD_BY
        },
        "exchange.topology": "explicit",
        "exchange.edges": ("qwen_log->llama", "llama_log->qwen"),
    }


def get_config():
    base = runpy.run_path(str(Path(__file__).with_name("demo.py")))["get_config"]()
    base.steps = 200  # main kinds are past their fastest gains, and SGT's rescues are over
    base.eval_problems = 320  # forty of each kind; with three seeds and pairing, differences of some points show
    base.eval_every = 20  # how soon a policy can do what only its peer could
    base.checkpoint_every = 50  # about half a minute of work to lose
    base.checkpoint_keep = 1  # thirty runs
    base.tensorboard = False  # TensorFlow's import would cost four seconds a run; metrics.jsonl has everything
    base.grader_workers = 1  # two runs share two cores
    arms = {
        "grpo": {"transfer.name": "none"},
        "grpo_2g": {"transfer.name": "none", "policy.group_size": 16},  # as many rollouts as a cohort of two together
        "xgrpo": {"transfer.name": "xgrpo"},
        "prp": {"transfer.name": "prp", "transfer.prp.variant": "prp_thl"},
        "prp_snapshot": {"transfer.name": "prp", "transfer.prp.variant": "prp_snapshot"},
        "graft": {"transfer.name": "graft"},
        "sgt": {"transfer.name": "sgt", "exchange.log": True},  # the log is for the arms below
        "sgt_frozen": {
            "transfer.name": "sgt",
            "exchange.log": True,
            "policies.llama_start": {"like": "llama", "frozen": True},
            "policies.qwen_start": {"like": "qwen", "frozen": True},
            "exchange.topology": "explicit",
            "exchange.edges": ("qwen_start->llama", "llama_start->qwen"),
        },
        # The log of `sgt` itself would replay that run to the last bit: the seed is the same, and so is what is heard.
        "sgt_log": {"transfer.name": "sgt", **logs("sgt_frozen")},
        "sft": {"transfer.name": "sft", **logs("sgt", used=True)},
    }
    return comparison(
        base,
        arms,
        seeds=(0, 1, 2),
        jobs=2,
        baseline="grpo",
        contrasts=("sgt/grpo_2g", "sgt/sgt_frozen", "sgt/sgt_log", "sgt/sft", "graft/grpo_2g", "prp/grpo_2g"),
    )
