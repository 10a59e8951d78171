"""Metadata of the package; each dependency with the reason it is here."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="mutualrl",
    version="0.1.0",
    description="Mutual reinforcement learning of several unlike language models in JAX",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mutualrl", "mutualrl.*"]),
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.2",  # arrays, compilation, meshes
        "flax>=0.12.8",  # the decoder (Linen)
        "flax>=0.12.12; python_version >= '3.12'",  # the newer jax there needs it
        "optax>=0.2.5",  # optimisers and schedules
        "orbax-checkpoint>=0.12",  # checkpoints
        "transformers>=5.0",  # chat templates and tokenizers of the hub (never PyTorch)
        "jinja2>=3.1",  # which chat templates are written in
        "tokenizers>=0.22",  # fast tokenizers, and the tiny ones made on the spot
        "sentencepiece",  # tokenizer.model files
        "tensorflow-datasets",  # prepared data sets
        "importlib-resources",  # which tensorflow-datasets imports without asking for it
        "tensorflow-cpu; platform_machine == 'x86_64' and sys_platform != 'darwin'",  # event files of clu
        "tensorflow; platform_machine != 'x86_64' or sys_platform == 'darwin'",  # without -cpu build
        "ml-collections",  # config files and overrides
        "clu",  # metric writers
        "tensorboard",  # which clu's writer imports without asking for it
        "safetensors",  # HF weights
        "gguf",  # GGUF weights, dequantisation
        "math-verify[antlr4_13_2]",  # mathematical equality of answers
        "reasoning-gym",  # procedural tasks with their own verifiers
        "pyarrow>=15",  # exchange.log: columnar files that pandas and pyarrow open
        "matplotlib>=3.8",  # plots of a comparison
        "scipy",  # quantiles for intervals over few seeds
        "rich",  # progress and tables
    ],
    extras_require={
        "test": ["pytest", "pytest-xdist", "hypothesis", "pandas", "ruff", "datasets"],
        "hf": ["datasets"],  # problem sets of the Hugging Face hub
        "parity": ["torch"],  # live comparison with transformers' own models
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        "vision": ["pillow"],
        "notebooks": ["jupyterlab"],
    },
)
