"""The demo: two tiny unlike policies, warmed up on the spot, learn from verifiable rewards and from each other (SGT).

`llama` reads bytes, `qwen` reads BPE pieces with digits in pairs. Each starts good at half of the tasks at which the
other is poor, and has one task that the other cannot do at all. Runs on two CPU cores in a few minutes.
"""

from mutualrl.config import add_policy, base_config, use_data, use_transfer

# Kinds of problems of mutualrl.data.procedural; each has a right rule and a consistent wrong one. Kinds with few
# possible answers are left out: a policy can be right there by luck.
FIRST = ("rev", "sort", "ends")  # llama is good at these, qwen poor
SECOND = ("inc", "swap", "max")  # qwen is good at these, llama poor
ONLY_FIRST = ("comp",)  # only llama can do these
ONLY_SECOND = ("dup",)  # only qwen can


def right(good, poor, never):
    """Probability of the right answer in a policy's demonstrations: where it is good, poor, or practically never right.

    At 0.2 most groups of eight rollouts still hold a right one (0.83), so that GRPO has something to learn from. At
    0.01 hardly any does (0.08): what can be learnt there has to come from the peer.
    """
    return {**{k: 0.9 for k in good}, **{k: 0.2 for k in poor}, **{k: 0.01 for k in never}}


def get_config():
    config = base_config()
    config.steps = 400  # about a minute and a half on two cores; both policies are past their fastest gains
    config.problems_per_step = 32  # four of each kind on average
    use_data(config, "procedural", kinds=FIRST + SECOND + ONLY_FIRST + ONLY_SECOND)
    use_transfer(config, "sgt")  # where all own rollouts fail and a peer's is right, imitate that one
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
            right=right(FIRST + ONLY_FIRST, SECOND, ONLY_SECOND),
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
            right=right(SECOND + ONLY_SECOND, FIRST, ONLY_FIRST),
            steps=2500,
        ),
    )
    return config
