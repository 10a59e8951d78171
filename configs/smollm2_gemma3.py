"""A real pair: SmolLM2-135M-Instruct and Gemma-3-270M (pretrained) on short arithmetic with a two-shot prompt.

The models come from the GGUF files that `launch/fetch_small_models.sh` fetches. On a machine with a hub, give

    --config.policies.smollm2.model=HuggingFaceTB/SmolLM2-135M-Instruct
    --config.policies.gemma3.model=google/gemma-3-270m

and for local HF folders their paths, in the same way.
"""

from mutualrl.config import add_policy, base_config, use_data

# Both models solve some of these and neither all: mixed groups, from which GRPO learns.
TEMPLATE = """\
Question: Solve the following multiplication: 3 * 8. Give only the result as your final answer.
Answer: 24

Question: Find the Greatest Common Divisor (GCD) of these numbers: 12, 18. Give only the GCD as your final answer.
Answer: 6

Question: {question}
Answer:"""


def get_config():
    config = base_config()
    config.steps = 100  # a first look; published runs take hundreds of steps of ten times the problems
    config.problems_per_step = 8  # 64 rollouts a policy: what two CPU cores can do in minutes
    use_data(config, "reasoning_gym", tasks=dict(products=dict(max_digits=1), gcd=dict(max_value=30)), size=400)
    config.grader = "reasoning_gym"  # every task brings its own verifier
    config.eval_problems = 64  # intervals of about ±0.1
    config.eval_samples = 4  # pass@1 from four samples a problem
    config.checkpoint_every = 10  # a step takes a while on a CPU

    config.policy.template = TEMPLATE
    config.policy.stop_text = "\n"  # a pretrained model does not end its turn; the line does
    config.policy.max_prompt_tokens = 112
    config.policy.prompt_bucket = 112  # all prompts are nearly as long: one compilation
    config.policy.group_size = 8  # the usual size of published runs
    config.policy.max_new_tokens = 16  # an answer has two or three tokens
    config.policy.micro_batch = 8  # rows of a pass: keeps a step within a few GB
    config.policy.lr = 1e-6  # as in the published GRPO recipes
    config.policy.clip_high = 0.28  # DAPO
    add_policy(config, "smollm2", model="models/smollm2-135m-instruct.gguf")
    add_policy(config, "gemma3", model="models/gemma3-270m.gguf")
    return config
