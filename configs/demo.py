"""The demo: two tiny unlike policies, warmed up on the spot, trained side by side with GRPO on verifiable problems.

`llama` reads bytes, `qwen` reads BPE pieces with digits in pairs; each starts good at the half of the tasks at which
the other is poor. Runs on two CPU cores in a few minutes.
"""

from mutualrl.config import add_policy, base_config, use_data

# Kinds of problems of mutualrl.data.procedural; each has a right rule and a consistent wrong one. Kinds with few
# possible answers are left out: a policy can be right there by luck.
FIRST = ("rev", "comp", "sort", "ends")
SECOND = ("inc", "swap", "dup", "max")


def right(good, poor):
    """Probability of the right answer in a policy's demonstrations: where it is good, and where it is poor.

    At 0.2 most groups of eight rollouts still hold a right one (0.83), so that GRPO has something to learn from.
    """
    return {**{k: 0.9 for k in good}, **{k: 0.2 for k in poor}}


def get_config():
    config = base_config()
    config.steps = 400  # about a minute and a half on two cores; both policies are past their fastest gains
    config.problems_per_step = 32  # four of each kind on average
    use_data(config, "procedural", kinds=FIRST + SECOND)
    config.grader = "exact"  # answers are digits of a known length
    config.eval_problems = 800  # a hundred of each kind: intervals of about ±0.1 a kind, ±0.03 in all
    config.eval_samples = 4  # pass@1 from four samples a problem; one would double the noise within problems
    config.checkpoint_every = 100  # less than a minute of work to lose

    config.policy.model = "warmup"  # made by mutualrl.warmup, as described below
    config.policy.group_size = 8  # the usual size of published runs
    config.policy.max_new_tokens = 6  # four digits, the stop id, and one to spare
    config.policy.max_prompt_tokens = 16  # the longest prompt has eleven
    config.policy.prompt_bucket = 16  # one length, one compilation
    config.policy.unroll_layers = True  # two layers: a quarter off the time of an update on a CPU
    config.policy.lr = 5e-4  # tiny models; 1e-3 made it worse
    config.policy.schedule = "linear"  # a smaller step at the end leaves less noise in the final accuracy
    config.policy.warmup_fraction = 0.03  # a few updates, until Adam's second moments are set
    config.policy.stable_fraction = 0.5  # half of the run at full rate
    config.policy.lr_end = 0.05  # not 0: the last steps still count
    add_policy(config, "llama")
    add_policy(config, "qwen")

    config.warmup.folder = "cache/demo"  # models are found again here by their settings
    config.warmup.policies = dict(
        llama=dict(
            hf=dict(
                model_type="llama",
                hidden_size=64,  # with two layers the smallest that learns eight rules in a minute
                intermediate_size=176,  # 8/3 of the width, as in Llama
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                tie_word_embeddings=True,  # few ids, fewer parameters
            ),
            tokenizer="bytes",
            bos=True,  # as Llama has one
            right=right(FIRST, SECOND),
            steps=2500,  # with 1500 the rare rules of the poor kinds are not separated yet (pass@1 of 0.01)
        ),
        qwen=dict(
            hf=dict(
                model_type="qwen3",
                hidden_size=96,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,  # grouped queries, as in Qwen
                head_dim=16,
                tie_word_embeddings=True,
            ),
            tokenizer="bpe",
            tokenizer_size=420,  # 256 bytes, all pairs of digits, the names of the kinds
            right=right(SECOND, FIRST),
            steps=2500,
        ),
    )
    return config
