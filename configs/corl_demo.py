"""Co-RL on tiny policies, without ground truth: each is rewarded by the majority vote of the one before it.

    --config=configs/corl_demo.py                different families (the default)
    --config=configs/corl_demo.py:same           one family, other seeds
    --config=configs/corl_demo.py:views          different families, the second sees other wordings
    --config=configs/corl_demo.py:three          a ring of three

Each policy starts good at half of the kinds and poor at the other half. Gold answers feed metrics and the evaluation.
"""

from mutualrl.config import add_policy, base_config, use_data, use_label

# Kinds of mutualrl.data.procedural with as many answers as questions: where few answers are possible, votes lock onto
# one that all share.
FIRST = ("rev", "sort")
SECOND = ("inc", "swap")
COHORTS = ("different", "same", "views", "three")


def right(good, poor, p_good, p_poor):
    """Probability of the right answer in a policy's demonstrations."""
    return {**dict.fromkeys(good, p_good), **dict.fromkeys(poor, p_poor)}


def recipes(p_good, p_poor):
    """Warm-ups of the policies: names, models, and what each is good at."""
    first, second = right(FIRST, SECOND, p_good, p_poor), right(SECOND, FIRST, p_good, p_poor)
    llama = dict(
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
        steps=1500,  # four kinds, none of them rare: enough for pass@1 near the probabilities
    )
    qwen = dict(
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
        steps=1500,
    )
    return dict(
        llama=dict(**llama, right=first),
        llama_b=dict(**llama, right=second),
        qwen=dict(**qwen, right=second),
        qwen_b=dict(**qwen, right=first),
    )


def get_config(cohort="different", p_good=0.95, p_poor=0.35):
    if cohort not in COHORTS:
        raise ValueError(f"cohort {cohort!r}: must be one of {', '.join(COHORTS)}")
    config = base_config()
    config.steps = 120  # peer votes have settled; about half a minute on two cores
    config.problems_per_step = 32  # eight of each kind on average
    use_data(config, "procedural", kinds=FIRST + SECOND, views=1 if cohort == "views" else 0)
    use_label(config, "peer_vote")
    config.grader = "exact"  # answers are digits of a known length
    config.eval_problems = 400  # a hundred of each kind
    config.eval_samples = 4
    config.policy.model = "warmup"
    config.policy.group_size = 8
    config.policy.max_new_tokens = 6  # four digits, the stop id, and one to spare
    config.policy.max_prompt_tokens = 16
    config.policy.prompt_bucket = 16
    config.policy.unroll_layers = True
    config.policy.lr = 5e-4  # tiny models; the published 1e-6 is for billions of parameters
    config.policy.schedule = "linear"
    config.policy.warmup_fraction = 0.03
    config.policy.stable_fraction = 0.5
    config.policy.lr_end = 0.05
    names = {"same": ("llama", "llama_b"), "three": ("llama", "qwen", "qwen_b")}.get(cohort, ("llama", "qwen"))
    for name in names:
        add_policy(config, name)
    if cohort == "views":
        config.policies.qwen.view = 1  # `4172:rev=` where llama sees `rev:4172=`
    config.warmup.folder = "cache/corl"
    config.warmup.policies = {name: recipes(p_good, p_poor)[name] for name in names}
    return config
