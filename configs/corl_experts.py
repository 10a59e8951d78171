"""Complementary experts: label-free learning of two tiny policies that are each good where the other is poor.

    --config=configs/corl_experts.py             .95 of one half right and .35 of the other; every label source
    --config=configs/corl_experts.py:separatrix  .90 and .20: near the line between the two fates that theory draws
    --config=configs/corl_experts.py:wrong       .80 and .10: together wrong more often than right

Theory (mutualrl.analysis.theory) says, of votes without noise: peers' votes lead a kind to right if p_A + p_B is above
1, and to wrong if it is below; own votes lead it to right where the policy itself is above one half. So from .95/.35
peers' votes end at 1 and own votes at one half, and from .80/.10 peers' votes end at 0. Every source of labels sees the
same problems in the same order, three seeds.
"""

import runpy
from pathlib import Path

from mutualrl.arms import comparison

STARTS = {"apart": (0.95, 0.35), "separatrix": (0.9, 0.2), "wrong": (0.8, 0.1)}


def get_config(start="apart"):
    if start not in STARTS:
        raise ValueError(f"start {start!r}: must be one of {', '.join(STARTS)}")
    demo = runpy.run_path(str(Path(__file__).with_name("corl_demo.py")))["get_config"]
    base = demo("different", *STARTS[start])
    base.eval_every = 20  # when kinds lock, right or wrong
    base.checkpoint_every = 60
    base.checkpoint_keep = 1
    base.tensorboard = False  # TensorFlow's import would cost four seconds a run
    base.grader_workers = 1
    arms = {
        "self_vote": {"label.name": "self_vote", "label.self_vote.n_vote": 0},  # as many rollouts as the others
        "peer_vote": {"label.name": "peer_vote"},
        "verifier": {"label.name": "verifier"},
        "pooled_vote": {"label.name": "pooled_vote"},
        "self_certainty": {"label.name": "self_certainty"},
        "entropy": {"label.name": "entropy"},
        # The published speeds are for thousands of steps at a small learning rate: here the teacher would stand still.
        "teacher": {"label.name": "teacher", "label.teacher.start": 0.1, "label.teacher.end": 0.01},
    }
    if start != "apart":
        arms = {name: arms[name] for name in ("self_vote", "peer_vote", "verifier")}
    return comparison(base, arms, seeds=(0, 1, 2), jobs=2, baseline="self_vote", contrasts=("peer_vote/verifier",))
