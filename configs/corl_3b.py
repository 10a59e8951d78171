"""Co-RL at 3B, with the published models and settings: Qwen2.5-3B and Llama-3.2-3B-Instruct, no ground truth.

    --config=configs/corl_3b.py              different families (the default)
    --config=configs/corl_3b.py:same_qwen    Qwen2.5-3B twice, with other samples
    --config=configs/corl_3b.py:same_llama   Llama-3.2-3B-Instruct twice
    --config=configs/corl_3b.py:views        different families, one sees reworded problems ("different family+")

For eight accelerators of 80 GB or a slice of TPU v5e-32; on less, lower `micro_batch_tokens`. It can be read, and has
never been run: no such machine was at hand.

Problems: `data/math_train.jsonl`, one object a line with id, question, answer; the paper trains on levels 3 to 5 of the
MATH training set (`jq -c 'select(.level >= 3)'`). Held out: `data/math500.jsonl`. Gold answers feed metrics only. Views
come from `data/math_views.jsonl`, which `python -m mutualrl.rephrase` writes.

Published (code): ring, string identity, no minimum share, learning rate 1e-6, no KL, temperature 1. Second-hand:
8 rollouts a problem (12 in larger runs), 3072 tokens, evaluation at temperature .6 and top-p .95. Ours: batch of 128
problems, AdamW as the other configs have it, the system prompt. The published runs choose checkpoints by labelled
validation; this one keeps the last.
"""

from mutualrl.config import add_policy, base_config, use_data, use_label

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
QWEN, LLAMA = "Qwen/Qwen2.5-3B", "meta-llama/Llama-3.2-3B-Instruct"
COHORTS = {
    "different": {"qwen": QWEN, "llama": LLAMA},
    "same_qwen": {"qwen_a": QWEN, "qwen_b": QWEN},
    "same_llama": {"llama_a": LLAMA, "llama_b": LLAMA},
    "views": {"qwen": QWEN, "llama": LLAMA},
}


def get_config(cohort="different", cohorts=None):
    cohorts = cohorts or COHORTS
    if cohort not in cohorts:
        raise ValueError(f"cohort {cohort!r}: must be one of {', '.join(cohorts)}")
    config = base_config()
    use_label(config, "peer_vote")
    use_data(config, "jsonl", train="data/math_train.jsonl", test="data/math500.jsonl")
    config.grader = "math"
    config.grader_workers = 8
    config.steps = 300
    config.problems_per_step = 128
    config.eval_problems = 500
    config.eval_samples = 8
    config.eval_temperature = 0.6
    config.eval_top_p = 0.95
    config.eval_every = 50
    config.checkpoint_every = 25
    config.policy.system = SYSTEM
    config.policy.group_size = 8
    config.policy.max_prompt_tokens = 1024
    config.policy.prompt_bucket = 256
    config.policy.max_new_tokens = 3072
    config.policy.slots = 256  # completions side by side: bounds the cache
    config.policy.micro_batch_tokens = 32_768
    config.policy.dtype = "bfloat16"
    config.policy.remat = True
    config.policy.weight_decay = 0.01
    config.policy.warmup_fraction = 0.03
    for i, (name, model) in enumerate(cohorts[cohort].items()):
        add_policy(config, name, model=model, view=i if cohort == "views" else 0)
    if cohort == "views":
        config.views = "data/math_views.jsonl"
    return config
