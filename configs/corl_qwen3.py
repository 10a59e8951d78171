"""Co-RL with Qwen3-1.7B-Base: one family twice, or with Llama-3.2-3B-Instruct; settings and data as in `corl_3b.py`.

    --config=configs/corl_qwen3.py           Qwen3-1.7B-Base twice
    --config=configs/corl_qwen3.py:different and Llama-3.2-3B-Instruct
    --config=configs/corl_qwen3.py:views     twice, the second sees reworded problems

For four accelerators of 80 GB or a slice of TPU v5e-16. Never run: no such machine was at hand.
"""

import runpy
from pathlib import Path

QWEN, LLAMA = "Qwen/Qwen3-1.7B-Base", "meta-llama/Llama-3.2-3B-Instruct"
COHORTS = {
    "same": {"qwen_a": QWEN, "qwen_b": QWEN},
    "different": {"qwen": QWEN, "llama": LLAMA},
    "views": {"qwen_a": QWEN, "qwen_b": QWEN},
}


def get_config(cohort="same"):
    small = runpy.run_path(str(Path(__file__).with_name("corl_3b.py")))["get_config"]
    return small(cohort, COHORTS)
