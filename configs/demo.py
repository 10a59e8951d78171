"""The demo: two tiny unlike policies, warmed up on the spot, trained side by side with GRPO on verifiable problems.

`llama` reads bytes, `qwen` reads BPE pieces with digits in pairs; each starts good at the half of the tasks at which
the other is poor. Runs on two CPU cores in a few minutes.
"""

from mutualrl.config import add_policy, base_config, use_data

# Kinds of problems of mutualrl.data.procedural; each has a right rule and a consistent wrong one.
FIRST = ("rev", "comp", "sort", "ends")
SECOND = ("inc", "swap", "dup", "max")


def right(good, poor):
    """Probability of the right answer in a policy's demonstrations: where it is good, and where it is poor."""
    return {**{k: 0.9 for k in good}, **{k: 0.2 for k in poor}}


def get_config():
    config = base_config()
    config.steps = 250
    config.problems_per_step = 32  # four of each kind on average
    use_data(config, "procedural", kinds=FIRST + SECOND)
    config.grader = "exact"
    config.eval_problems = 800  # a hundred of each kind: intervals of about ±0.1 a kind, ±0.03 in all
    config.eval_samples = 4
    config.checkpoint_every = 100

    config.policy.model = "warmup"
    config.policy.group_size = 8
    config.policy.max_new_tokens = 6  # four digits, the stop id, and one to spare
    config.policy.max_prompt_tokens = 16
    config.policy.prompt_bucket = 16  # one length, one compilation
    config.policy.unroll_layers = True  # two layers: a quarter off the time of an update on a CPU
    config.policy.lr = 5e-4  # tiny models; 1e-3 made it worse
    config.policy.schedule = "linear"
    config.policy.warmup_fraction = 0.03
    config.policy.stable_fraction = 0.5
    config.policy.lr_end = 0.05
    add_policy(config, "llama")
    add_policy(config, "qwen")

    config.warmup.folder = "cache/demo"
    config.warmup.policies = dict(
        llama=dict(
            hf=dict(
                model_type="llama",
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                tie_word_embeddings=True,
            ),
            tokenizer="bytes",
            bos=True,
            right=right(FIRST, SECOND),
            steps=2500,
        ),
        qwen=dict(
            hf=dict(
                model_type="qwen3",
                hidden_size=96,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=16,
                tie_word_embeddings=True,
            ),
            tokenizer="bpe",
            tokenizer_size=420,
            right=right(SECOND, FIRST),
            steps=2500,
        ),
    )
    return config
