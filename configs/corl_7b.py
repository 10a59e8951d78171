"""Co-RL at 7B and 8B: Qwen2.5-7B and Llama-3.1-8B-Instruct; settings, data and cohorts as in `corl_3b.py`.

    --config=configs/corl_7b.py      --config=configs/corl_7b.py:same_qwen      …:same_llama      …:views

For sixteen accelerators of 80 GB or more. Never run: no such machine was at hand.
"""

import runpy
from pathlib import Path

QWEN, LLAMA = "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct"
COHORTS = {
    "different": {"qwen": QWEN, "llama": LLAMA},
    "same_qwen": {"qwen_a": QWEN, "qwen_b": QWEN},
    "same_llama": {"llama_a": LLAMA, "llama_b": LLAMA},
    "views": {"qwen": QWEN, "llama": LLAMA},
}


def get_config(cohort="different"):
    small = runpy.run_path(str(Path(__file__).with_name("corl_3b.py")))["get_config"]
    config = small(cohort, COHORTS)
    config.policy.slots = 128
    config.policy.micro_batch_tokens = 16_384
    return config
